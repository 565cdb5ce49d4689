"""The workers of one run: their functions are started, watched, restarted if they die, and grown if too small.

It reports facts: the functions, their times and their cost. It raises WorkerFailed or RunHalted once the run cannot go
on.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from funcpipe.client.control.verdict import final_failures, first_failure, how_it_ended
from funcpipe.client.follow.functions import HeartbeatWatch, WatchedWorker, attached, await_end, joined, start_as_owner
from funcpipe.client.follow.growth import LESS_MEMORY, grown, larger_sizes
from funcpipe.core import (
    MB,
    OnOutOfMemory,
    Outcome,
    PlatformSpec,
    RunAccount,
    WorkerReport,
    WorkerSpec,
    prices_of,
)
from funcpipe.core.stores import DEFAULT_STORES, Stores
from funcpipe.errors import DeadlineExceeded, PlatformError, RunHalted, Superseded, WorkerFailed
from funcpipe.platforms.base import Cause, Platform, RequestMeter, State, Status, Storage
from funcpipe.platforms.function_group import FunctionGroup, WatchedFunction, stop_functions
from funcpipe.runstate.documents import find_readable_document
from funcpipe.runstate.functions import list_functions, unmark_run
from funcpipe.runstate.generations import find_objects, write_payload
from funcpipe.runstate.halt import read_halt_reason
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import LastAttempt, last_attempts, newest_attempt
from funcpipe.runstate.liveness import newest_heartbeat
from funcpipe.runstate.reader import request_usd

_log = logging.getLogger(__name__)

POLL_S = 0.02
"""Pause between two polls of functions or of their objects."""

POLLED_AT_ONCE = 16
"""The functions of which a poll asks the platform, one after another in turn: of 1,000, each every six seconds."""

_RUN_ENDED = (WorkerFailed, RunHalted, DeadlineExceeded)


class Supervisor:
    """The workers of one run; on leaving it no function runs, unless they were left to themselves.

    `account` is what the run had cost and taken before. `check_owner` raises Superseded if another client owns the run.
    A run that has finished, or failed without `keep`, is deleted next: its payloads go with its functions.
    """

    def __init__(
        self,
        platform: Platform,
        storage: Storage,
        keys: Keys,
        *,
        prices: PlatformSpec,
        stores: Stores = DEFAULT_STORES,
        account: RunAccount,
        keep: bool = True,
        check_owner: Callable[[], None] = lambda: None,
        meter: RequestMeter | None = None,
    ) -> None:
        self._storage = storage
        self._keys = keys
        self._group = FunctionGroup(platform)
        self._prices, self._stores = prices, stores
        self._account, self._keep = account, keep
        self._check_owner = check_owner
        self._meter = meter or RequestMeter()
        self._workers: dict[str, WatchedWorker] = {}
        self._heartbeats = HeartbeatWatch(storage, keys, self._workers)
        self._turn = 0
        self._began_s = time.monotonic()
        self._attached = self._detached = False
        self._lock, self._gave_up = threading.Lock(), threading.Event()

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """End all functions; those of a run that others have started only if the run itself has ended."""
        if isinstance(error, Superseded):  # the client that has taken the run over ends them
            await_end(lambda: any(self._group.runs(found.started) for found in self.functions()))
            return
        goes_on = self._attached and error is not None and not isinstance(error, _RUN_ENDED)
        if goes_on:
            _log.warning("run %s: is not watched any more, and goes on", self._keys.run)
        elif not self._detached:
            self.stop(for_good=error is None or not self._keep)

    def start(self, spec: WorkerSpec) -> None:
        """Start the function of one worker. Several threads may call it."""
        self._workers[spec.worker] = worker = WatchedWorker(spec)
        self._invoke(worker, spec)

    def give_up(self) -> None:
        """Let no start wait any longer for a platform that is busy: it raises PlatformError."""
        self._gave_up.set()

    def attach(self, specs: Iterable[WorkerSpec]) -> None:
        """Watch the functions that others have started for the workers of a run."""
        self._attached = True
        for spec in specs:
            self._workers[spec.worker] = WatchedWorker(spec, beat_seen_s=time.monotonic())
        for function in attached(self._storage, self._keys, self._group.runs):
            self._group.watch(function)

    def detach(self) -> None:
        """Let the functions run on without this client."""
        self._group.platform.detach()
        self._detached = True
        _log.info("run %s: is left to itself", self._keys.run)

    def stop(self, *, for_good: bool = False) -> None:
        """End all functions, those that functions have started too. With `for_good`, the payloads go first."""
        with contextlib.suppress(Superseded):  # or another client has taken care of that
            unmark_run(self._storage, self._keys.run)  # no watchdog is to restart them
            if for_good:
                self._storage.delete_many(find_objects(self._storage, self._keys.payloads).own)
        known = {function.started.handle.name: function.started.handle for function in self.functions()}
        known |= {found.handle.name: found.handle for found in list_functions(self._storage, self._keys)}
        stop_functions(self._group.platform, known.values())

    def step_ended(self) -> None:
        """Note that a step of the run has ended: restarts are counted anew."""
        for worker in self._workers.values():
            worker.restarts.count = 0

    def poll(self) -> int:
        """Poll the functions, and restart those that have died; return how many workers are still at work.

        Of many functions, the platform is asked about some in each poll, and about those that have gone silent. Raises
        WorkerFailed where a restart would not help, RunHalted where the run was ended.
        """
        at_work = [worker for worker in self._workers.values() if worker.outcome is None]
        silent = self._silent(at_work)
        due = [worker for worker in at_work if worker.restarts.due_s is not None]
        self._supervise([*due, *silent, *self._next(at_work)], silent)
        if any(worker.outcome is Outcome.HALTED for worker in self._workers.values()):
            self._explain_halt()
        return sum(worker.outcome is None for worker in self._workers.values())

    def wait(self, deadline_s: float) -> None:
        """Wait until all workers have ended; raises DeadlineExceeded, and what `poll` raises."""
        until_s = time.monotonic() + deadline_s
        while left := self.poll():
            if time.monotonic() > until_s:
                raise DeadlineExceeded(
                    f"run {self._keys.run}: {left} functions still run {deadline_s:g} s after the last step"
                )
            time.sleep(POLL_S)

    def functions(self) -> list[WatchedFunction]:
        """All functions that are known to have been started."""
        return [function for name in self._workers for function in self._group.of(name)]

    def cost_usd(self) -> float:
        """Dollars for the time of functions and of stores so far, with what the run had cost before."""
        watched = sum(function.watched_s() * function.started.usd_s for function in self.functions())
        hours = (self.elapsed_s() - self._account.elapsed_s) / 3600
        return self._account.spent_usd + watched + hours * self._prices.stores_usd_h(self._stores)

    def requests_usd(self) -> float:
        """Dollars for invocations, for functions' requests as last reported, and for this client's.

        Of functions too many to ask them all, the estimate of one that was read counts if it is more.
        """
        counted = [counts for worker in self._workers.values() for counts in worker.requests.values()]
        usd = request_usd(
            sum(counted, self._meter.by_kind), self._prices, self._stores, functions=len(self.functions())
        )
        usd += self._prices.traffic_usd(self._meter.counts.received_bytes)
        return usd if self._heartbeats.reads_all else max(usd, self._heartbeats.run_requests_usd)

    def elapsed_s(self) -> float:
        """Seconds that the run has taken, with those before."""
        return self._account.elapsed_s + time.monotonic() - self._began_s

    def _invoke(self, worker: WatchedWorker, spec: WorkerSpec) -> None:
        now_s = time.monotonic()
        platform = self._group.platform
        begun = start_as_owner(platform, self._storage, self._keys, spec, self._check_owner, sleep=self._sleep)
        with self._lock:
            self._group.watch(WatchedFunction(begun, now_s))
        worker.beat_seen_s = now_s

    def _sleep(self, seconds: float) -> None:
        if self._gave_up.wait(seconds):
            raise PlatformError("the run was given up while the platform was busy")

    def _silent(self, at_work: Sequence[WatchedWorker]) -> list[WatchedWorker]:
        """Return the workers whose functions have been silent for too long, if it is time to list heartbeats."""
        listed_s = self._heartbeats.list_due()
        if listed_s is None:
            return []
        started = [worker for worker in at_work if worker.restarts.due_s is None]
        return [worker for worker in started if worker.is_silent(self._newest(worker).started.attempt, listed_s)]

    def _next(self, at_work: Sequence[WatchedWorker]) -> Sequence[WatchedWorker]:
        """Return the workers whose turn it is to be looked after."""
        first = self._turn if self._turn < len(at_work) else 0
        self._turn = first + POLLED_AT_ONCE
        return at_work[first : self._turn]

    def _supervise(self, workers: Iterable[WatchedWorker], silent: Sequence[WatchedWorker]) -> None:
        """Look after `workers`, of which some are `silent`."""
        quiet, ended = {worker.spec.worker for worker in silent}, dict[str, Status]()
        for name, worker in {worker.spec.worker: worker for worker in workers}.items():
            if worker.restarts.due_s is not None:
                self._restart_if_due(worker)
                continue
            status = self._group.poll(self._newest(worker))
            if status.state is not State.RUNNING or name in quiet:
                ended[name] = status
        lasts = last_attempts(self._storage, self._keys, tuple(ended)) if ended else {}
        for name, last in lasts.items():
            worker, status = self._workers[name], ended[name]
            if last is not None and last.ended is not None:
                if last.ended is Outcome.FAILED:
                    raise first_failure(self._storage, self._keys)
                worker.outcome = last.ended
            elif status.state is State.RUNNING:
                self._restart(worker, "has sent no heartbeat for too long")
            else:
                self._replace(worker, status, last)

    def _replace(self, worker: WatchedWorker, status: Status, last: LastAttempt | None) -> None:
        """Watch the function that goes on in place of one that has ended, or start one."""
        function = self._newest(worker).started
        key = self._keys.worker_report(function.worker, function.attempt)
        report = find_readable_document(self._storage, WorkerReport, key)
        if report is not None and report.exhausted_device_mb is not None:
            self._out_of_device_memory(worker, report.exhausted_device_mb, report.peak_device_bytes)
        elif report is not None and report.out_of_memory and not report.retryable:
            self._out_of_memory(worker, report.peak_memory_bytes)
        elif status.cause is Cause.OUT_OF_MEMORY:
            self._out_of_memory(worker, status.peak_bytes or 0)
        elif not self._adopt(worker):
            taken_by = last.attempt if last is not None and last.attempt > function.attempt else None
            leased = last is not None and last.attempt >= function.attempt
            self._restart(worker, how_it_ended(function.handle, status, report, leased=leased, taken_by=taken_by))

    def _newest(self, worker: WatchedWorker) -> WatchedFunction:
        return self._group.of(worker.spec.worker)[-1]

    def _adopt(self, worker: WatchedWorker) -> bool:
        """Watch the function that goes on, if there is one: a successor, or the first of this attempt."""
        name = worker.spec.worker
        known = {function.started.handle.name: function for function in self._group.of(name)}
        for found in reversed(list_functions(self._storage, self._keys, name)):
            if not self._group.runs(found):
                continue
            function = known.get(found.handle.name)
            if function is None:
                function = joined(found, newest_heartbeat(self._storage, self._keys, name)).from_its_start()
            function.ended_s, function.is_unknown = None, False
            self._group.watch(function)
            worker.beat_seen_s = time.monotonic()
            _log.info(
                "run %s: worker %s goes on as attempt %d (%s), which a function has started",
                *(self._keys.run, found.worker, found.attempt, found.handle.name),
            )
            return True
        return False

    def _restart(self, worker: WatchedWorker, why: str) -> None:
        restarts = worker.restarts
        restarts.due_s = time.monotonic() + restarts.add(why)
        if restarts.are_exhausted:
            otherwise = f"worker {worker.spec.worker} {why}, {restarts.count} times without a step in between"
            raise first_failure(self._storage, self._keys, otherwise)
        self._restart_if_due(worker)

    def _restart_if_due(self, worker: WatchedWorker) -> None:
        if not worker.restarts.take_due(time.monotonic()):
            return
        name, why = worker.spec.worker, worker.restarts.cause
        newest = newest_attempt(self._storage, self._keys, name)
        attempt = 0 if newest is None else newest + 1
        _log.warning("run %s: restarts worker %s as attempt %d: it %s", self._keys.run, name, attempt, why)
        account = replace(
            worker.spec.account,
            spent_usd=self.cost_usd(),
            elapsed_s=self.elapsed_s(),
            requests_usd=self.requests_usd(),
            step_s=self._heartbeats.step_s,
        )
        try:
            self._invoke(worker, replace(worker.spec, attempt=attempt, account=account))
        except PlatformError as error:
            self._restart(worker, f"cannot be started: {error}")

    def _out_of_memory(self, worker: WatchedWorker, peak_bytes: int) -> None:
        """Restart the worker in a larger function, if that is wanted and there is one."""
        self._heartbeats.read([worker])
        stage = worker.spec.plan.stages[worker.spec.stage]
        had_mb = self._newest(worker).started.memory_mb or worker.memory_mb or stage.memory_mb
        worker.peak_bytes = max(worker.peak_bytes, peak_bytes)
        message = f"ran out of memory: peak {worker.peak_bytes / MB:.0f} of {had_mb} MB"
        if had_mb >= stage.memory_mb:  # or else the stage has grown since this function was started
            self._grow(worker.spec, f"run {self._keys.run}: worker {worker.spec.worker} {message}")
        self._restart(worker, message)

    def _out_of_device_memory(self, worker: WatchedWorker, had_mb: int, peak_bytes: int) -> None:
        """Restart the worker in a function with a larger accelerator, if that is wanted and there is one."""
        worker.device_bytes = max(worker.device_bytes, peak_bytes)
        message = f"ran out of memory on its GPU: peak {worker.device_bytes / MB:.0f} of {had_mb} MB"
        if had_mb >= (worker.spec.device_memory_mb or 0):  # or else the stage has grown since
            self._grow(worker.spec, f"run {self._keys.run}: worker {worker.spec.worker} {message}", on_device=True)
        self._restart(worker, message)

    def _grow(self, spec: WorkerSpec, failure: str, *, on_device: bool = False) -> None:
        """Give the stage of `spec` a size with more memory from now on, of its accelerator if that was used up; raises
        WorkerFailed.
        """
        stage, functions = spec.plan.stages[spec.stage], self._group.platform.spec
        sizes = larger_sizes(self._prices.sizes, functions, stage.memory_mb, spec.device_memory_mb, on_device=on_device)
        if not sizes:
            raise WorkerFailed(f"{failure}; there is no larger {'GPU' if on_device else 'function'}, {LESS_MEMORY}")
        if spec.faults.on_oom is OnOutOfMemory.FAIL:
            raise WorkerFailed(f"{failure}; --set training.on-oom=grow continues with a larger function, {LESS_MEMORY}")
        replicas = [other for other in self._workers.values() if other.spec.stage == spec.stage]
        self._heartbeats.read(replicas)
        peak_bytes = max(other.device_bytes if on_device else other.peak_bytes for other in replicas)
        plan = grown(spec.plan, spec.stage, peak_bytes, sizes, self._group.platform.check, failure=failure)
        usd_s = prices_of(plan, self._prices).function_usd_s
        larger = plan.stages[spec.stage].size
        _log.warning("run %s: stage %d grows from %s to %s", self._keys.run, spec.stage, stage.size, larger)
        for other in self._workers.values():
            account = replace(other.spec.account, usd_s=usd_s[other.spec.stage], run_usd_s=sum(usd_s) * plan.replicas)
            device_mb = functions.device_memory_mb(plan.stages[other.spec.stage].size)
            other.spec = replace(other.spec, plan=plan, account=account, device_memory_mb=device_mb)
            write_payload(self._storage, self._keys, other.spec)

    def _explain_halt(self) -> None:
        """Raise the failure that ended the run, or why it was ended."""
        if final_failures(self._storage, self._keys):
            raise first_failure(self._storage, self._keys)
        if all(worker.outcome is not None for worker in self._workers.values()):
            reason = read_halt_reason(self._storage, self._keys)
            _log.warning("run %s: was ended: %s", self._keys.run, reason)
            raise RunHalted(f"run {self._keys.run} was ended: {reason}")
