"""The workers of one run: starts their functions, watches them, restarts those that die, grows those too small.

It tells facts: which functions there were, how long they ran, what they have cost. It raises WorkerFailed or RunHalted
once the run cannot go on.
"""

import logging
import time
from dataclasses import replace

from funcpipe.client.failures import final_failures, first_failure, how_it_ended
from funcpipe.client.functions import WatchedFunction, WatchedWorker
from funcpipe.core import (
    MB,
    Heartbeat,
    OnOutOfMemory,
    Outcome,
    Plan,
    PlatformSpec,
    RunAccount,
    WorkerReport,
    WorkerSpec,
    prices_of,
)
from funcpipe.errors import DeadlineExceeded, InputError, KeyMissing, PlatformError, RunHalted, WorkerFailed
from funcpipe.platforms.base import Cause, Platform, State, Status, Storage
from funcpipe.runstate.documents import get_document, put_document
from funcpipe.runstate.functions import MAX_RESTARTS, StartedFunction, list_functions, start_function, stop_functions
from funcpipe.runstate.halt import read_halt
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import newest_attempt

_log = logging.getLogger(__name__)

POLL_S = 0.02
"""Pause between two looks at functions or at what they wrote."""

_RUN_ENDED = (WorkerFailed, RunHalted, DeadlineExceeded)


class Supervisor:
    """The workers of one run; on leaving it no function runs, unless they were left to themselves.

    `account` is what the run had cost and taken before.
    """

    def __init__(
        self, platform: Platform, storage: Storage, keys: Keys, *, prices: PlatformSpec, account: RunAccount
    ) -> None:
        self._storage = storage
        self._keys = keys
        self._platform = platform
        self._prices = prices
        self._account = account
        self._workers: dict[str, WatchedWorker] = {}
        self._began_s = time.monotonic()
        self._attached = self._detached = False

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """End all functions; those of a run that others have started only if the run itself has ended."""
        lives_on = self._attached and error is not None and not isinstance(error, _RUN_ENDED)
        if lives_on:
            _log.warning("run %s: is not watched any more, and goes on", self._keys.run)
        elif not self._detached:
            self.stop()

    def start(self, spec: WorkerSpec) -> None:
        """Start the function of one worker."""
        self._workers[spec.worker] = worker = WatchedWorker(spec)
        self._invoke(worker, spec)

    def attach(self, spec: WorkerSpec) -> None:
        """Watch the functions of one worker that others have started."""
        self._attached = True
        self._workers[spec.worker] = worker = WatchedWorker(spec)
        worker.heard_s = now_s = time.monotonic()
        heartbeat = self._heartbeat(spec.worker)
        for found in list_functions(self._storage, self._keys, spec.worker):
            function = WatchedFunction(found, now_s)
            if heartbeat is not None and heartbeat.attempt == found.attempt:
                function.age_s = heartbeat.alive_s
            if self._status(found).state is not State.RUNNING:
                function.ended_s = now_s
            worker.functions.append(function)

    def detach(self) -> None:
        """Let the functions run on without this client."""
        self._platform.detach()
        self._detached = True
        _log.info("run %s: is left to itself", self._keys.run)

    def stop(self) -> None:
        """End all functions, those that functions have started too."""
        known = {function.started.handle.name: function.started.handle for function in self.functions()}
        known |= {found.handle.name: found.handle for found in list_functions(self._storage, self._keys)}
        stop_functions(self._platform, known.values())

    def step_ended(self) -> None:
        """Note that a step of the run has ended: restarts are counted anew."""
        for worker in self._workers.values():
            worker.restarts = 0

    def poll(self) -> int:
        """Look after the functions, and restart those that have died; returns how many workers are still at work.

        Raises WorkerFailed where a restart would not help, RunHalted where the run was ended.
        """
        for worker in self._workers.values():
            if worker.outcome is None:
                self._look_after(worker)
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
        return [function for worker in self._workers.values() for function in worker.functions]

    def cost_usd(self) -> float:
        """Dollars for the functions' time so far, with what the run had cost before."""
        watched = sum(function.watched_s() * function.started.usd_s for function in self.functions())
        return self._account.spent_usd + watched

    def elapsed_s(self) -> float:
        """How long the run has taken, with what it had taken before."""
        return self._account.elapsed_s + time.monotonic() - self._began_s

    def _invoke(self, worker: WatchedWorker, spec: WorkerSpec) -> None:
        now_s = time.monotonic()
        begun = start_function(self._platform, self._storage, self._keys, spec)
        worker.functions.append(WatchedFunction(begun, now_s, memory_mb=spec.memory_mb))
        worker.heard_s = now_s

    def _look_after(self, worker: WatchedWorker) -> None:
        function = worker.functions[-1]
        status = self._status(function.started)
        if status.state is State.RUNNING:
            if self._is_silent(worker):
                self._restart(worker, "has sent no heartbeat for too long")
            return
        function.ended_s = time.monotonic()
        report = self._report(worker.spec.worker, function.started.attempt)
        if report is not None and report.outcome in (Outcome.FINISHED, Outcome.HALTED):
            worker.outcome = report.outcome
        elif report is not None and report.outcome is Outcome.FAILED and not report.retryable:
            if not report.out_of_memory:
                raise first_failure(self._storage, self._keys)
            self._out_of_memory(worker, report.peak_memory_bytes)
        elif status.cause is Cause.OUT_OF_MEMORY:
            self._out_of_memory(worker, status.peak_bytes or 0)
        elif not self._adopt(worker):
            self._restart(worker, how_it_ended(function.started.handle, status, report))

    def _status(self, function: StartedFunction) -> Status:
        try:
            return self._platform.status(function.handle)
        except PlatformError as error:
            return Status(state=State.FAILED, reason=f"is not known any more: {error}")

    def _is_silent(self, worker: WatchedWorker) -> bool:
        """Whether nothing was heard of its function for too long; looks at its heartbeat now and then."""
        now_s = time.monotonic()
        if now_s - worker.looked_s < worker.spec.faults.heartbeat_s:
            return False
        worker.looked_s = now_s
        self._look_at_heartbeat(worker, now_s)
        return worker.is_silent(now_s)

    def _look_at_heartbeat(self, worker: WatchedWorker, now_s: float) -> None:
        heartbeat = self._heartbeat(worker.spec.worker)
        if heartbeat is None:
            return
        worker.peak_bytes = max(worker.peak_bytes, heartbeat.memory_bytes)
        worker.memory_mb = heartbeat.memory_mb
        beat = heartbeat.attempt, heartbeat.beat
        if beat != worker.beat:
            worker.beat, worker.heard_s = beat, now_s

    def _adopt(self, worker: WatchedWorker) -> bool:
        """Watch the function that goes on, if there is one: a successor, or whichever was first as this attempt."""
        known = {function.started.handle.name: function for function in worker.functions}
        for found in reversed(list_functions(self._storage, self._keys, worker.spec.worker)):
            status = self._status(found)
            if status.state is State.FAILED:
                continue
            report = self._report(found.worker, found.attempt)
            if status.state is State.DONE and (report is None or report.outcome is Outcome.HANDED_OVER):
                continue
            function = known.get(found.handle.name) or WatchedFunction(found, time.monotonic())
            worker.functions = [other for other in worker.functions if other is not function] + [function]
            worker.heard_s = time.monotonic()
            _log.info(
                "run %s: worker %s goes on as attempt %d (%s), which a function has started",
                *(self._keys.run, found.worker, found.attempt, found.handle.name),
            )
            return True
        return False

    def _restart(self, worker: WatchedWorker, why: str) -> None:
        name = worker.spec.worker
        worker.restarts += 1
        if worker.restarts > MAX_RESTARTS:
            otherwise = f"worker {name} {why}, {worker.restarts} times without a step in between"
            raise first_failure(self._storage, self._keys, otherwise)
        newest = newest_attempt(self._storage, self._keys, name)
        attempt = 0 if newest is None else newest + 1
        _log.warning("run %s: restarts worker %s as attempt %d: it %s", self._keys.run, name, attempt, why)
        account = replace(worker.spec.account, spent_usd=self.cost_usd(), elapsed_s=self.elapsed_s())
        self._invoke(worker, replace(worker.spec, attempt=attempt, account=account))

    def _out_of_memory(self, worker: WatchedWorker, peak_bytes: int) -> None:
        """Restart the worker in a larger function, if that is wanted and there is one."""
        self._look_at_heartbeat(worker, time.monotonic())
        stage = worker.spec.plan.stages[worker.spec.stage]
        had_mb = worker.functions[-1].memory_mb or worker.memory_mb or stage.memory_mb
        message = f"ran out of memory: peak {max(worker.peak_bytes, peak_bytes) / MB:.0f} of {had_mb} MB"
        if had_mb >= stage.memory_mb:  # or else the stage has grown since this function was started
            self._grow(worker.spec, f"run {self._keys.run}: worker {worker.spec.worker} {message}")
        self._restart(worker, message)

    def _grow(self, spec: WorkerSpec, failure: str) -> None:
        """Give the stage of `spec` a larger size from now on; raises WorkerFailed."""
        stage = spec.plan.stages[spec.stage]
        remedy = "smaller micro-batches or --recompute auto need less"
        if not any(size.memory_mb > stage.memory_mb for size in self._prices.sizes):
            raise WorkerFailed(f"{failure}; there is no larger function, {remedy}")
        if spec.faults.on_oom is OnOutOfMemory.FAIL:
            raise WorkerFailed(f"{failure}; --on-oom grow continues with a larger function, {remedy}")
        plan = self._grown(spec.plan, spec.stage, failure)
        usd_s = prices_of(plan, self._prices).function_usd_s
        _log.warning(
            "run %s: stage %d grows from %s to %s",
            *(self._keys.run, spec.stage, stage.size, plan.stages[spec.stage].size),
        )
        for other in self._workers.values():
            account = replace(other.spec.account, usd_s=usd_s[other.spec.stage], run_usd_s=sum(usd_s) * plan.replicas)
            other.spec = replace(other.spec, plan=plan, account=account)
            put_document(self._storage, self._keys.payload(other.spec.worker), other.spec)

    def _grown(self, plan: Plan, number: int, failure: str) -> Plan:
        """`plan` with the next larger size for stage `number` that the platform can run; raises WorkerFailed."""
        refusals = []
        for size in sorted(self._prices.sizes, key=lambda size: size.memory_mb):
            if size.memory_mb <= plan.stages[number].memory_mb:
                continue
            larger = replace(plan.stages[number], size=size.name, memory_mb=size.memory_mb)
            grown = replace(plan, stages=(*plan.stages[:number], larger, *plan.stages[number + 1 :]))
            try:
                self._platform.check(grown)
            except InputError as error:
                refusals.append(f"{size.name}: {error}")
            else:
                return grown
        raise WorkerFailed(f"{failure}; no larger function can run there ({'; '.join(refusals)})")

    def _heartbeat(self, worker: str) -> Heartbeat | None:
        try:
            return get_document(self._storage, Heartbeat, self._keys.heartbeat(worker))
        except KeyMissing:
            return None

    def _report(self, worker: str, attempt: int) -> WorkerReport | None:
        try:
            return get_document(self._storage, WorkerReport, self._keys.worker_report(worker, attempt))
        except KeyMissing:
            return None

    def _explain_halt(self) -> None:
        """Raise the failure that ended the run, or why it was ended."""
        if final_failures(self._storage, self._keys):
            raise first_failure(self._storage, self._keys)
        if all(worker.outcome is not None for worker in self._workers.values()):
            halt = read_halt(self._storage, self._keys)
            reason = halt.reason if halt is not None else "its order to end is gone"
            _log.warning("run %s: was ended: %s", self._keys.run, reason)
            raise RunHalted(f"run {self._keys.run} was ended: {reason}")
