"""The functions of one run, as their client sees them: starts them, starts them again, tells what they cost."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from funcpipe.client.failures import how_it_ended, worst
from funcpipe.core import MB, Bill, Heartbeat, OnOutOfMemory, Outcome, PlatformSpec, WorkerReport, WorkerSpec
from funcpipe.errors import DeadlineExceeded, KeyMissing, PlatformError, RunHalted, WorkerFailed
from funcpipe.platforms.base import Cause, Platform, State, Status, Storage
from funcpipe.runstate.documents import get_document, get_listed_document, put_document
from funcpipe.runstate.functions import RESTARTS, Started, end, start, started
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import newest_attempt
from funcpipe.worker.heartbeat import standing_order

POLL_S = 0.02
"""Pause between two looks at functions or at what they wrote."""


_log = logging.getLogger(__name__)


@dataclass
class _Function:
    """A function of a worker; `began_s` and `ended_s` are by this process's clock, as it came to know of them."""

    started: Started
    began_s: float
    ended_s: float | None = None


@dataclass
class _Post:
    """A worker, the functions that were or are it, and the last sign of life: which, and when it came."""

    spec: WorkerSpec
    functions: list[_Function] = field(default_factory=list)
    outcome: Outcome | None = None
    restarts: int = 0
    sign: tuple[int, int] = (-1, 0)
    sign_s: float = 0.0
    looked_s: float = 0.0
    peak_bytes: int = 0


class Supervisor:
    """The functions of one run; on leaving it, none runs any more, unless it was told to `detach`."""

    def __init__(
        self,
        platform: Platform,
        storage: Storage,
        keys: Keys,
        *,
        prices: PlatformSpec,
        on_oom: OnOutOfMemory = OnOutOfMemory.FAIL,
    ) -> None:
        self.storage = storage
        self.keys = keys
        self._platform = platform
        self._prices = prices
        self._on_oom = on_oom
        self._posts: dict[str, _Post] = {}
        self._began_s = time.monotonic()
        self._detached = False

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._detached:
            self.stop()

    def start(self, spec: WorkerSpec) -> None:
        """Start the function of one worker."""
        self._posts[spec.worker] = post = _Post(spec)
        self._invoke(post, spec)

    def attach(self, spec: WorkerSpec) -> None:
        """Watch the functions of one worker that somebody else has started."""
        self._posts[spec.worker] = post = _Post(spec)
        now_s = time.monotonic()
        post.functions = [_Function(found, now_s) for found in started(self.storage, self.keys, spec.worker)]
        post.sign_s = now_s

    def detach(self) -> None:
        """Let the functions run on."""
        self._platform.detach()
        self._detached = True

    def stop(self) -> None:
        """End all functions, also those that functions have started."""
        known = {f.started.handle.name: f.started.handle for post in self._posts.values() for f in post.functions}
        known |= {found.handle.name: found.handle for found in started(self.storage, self.keys)}
        end(self._platform, known.values())

    def progress(self) -> None:
        """Note that the run goes on."""
        for post in self._posts.values():
            post.restarts = 0

    def tend(self) -> int:
        """Look after the functions, and start those again that have died; how many workers are not done.

        Raises WorkerFailed where that would not help, RunHalted where the run was ended.
        """
        for post in self._posts.values():
            if post.outcome is None:
                self._tend(post)
        if any(post.outcome is Outcome.HALTED for post in self._posts.values()):
            self._explain_halt()
        return sum(post.outcome is None for post in self._posts.values())

    def wait(self, deadline_s: float) -> None:
        """Wait for all workers to end."""
        until_s = time.monotonic() + deadline_s
        while left := self.tend():
            if time.monotonic() > until_s:
                raise DeadlineExceeded(
                    f"run {self.keys.run}: {left} functions still run {deadline_s:g} s after the last step"
                )
            time.sleep(POLL_S)

    def reports(self) -> tuple[WorkerReport, ...]:
        """What all attempts said that could."""
        keys = self.storage.list(self.keys.worker_reports)
        return tuple(get_listed_document(self.storage, WorkerReport, key) for key in keys)

    def cost_usd(self) -> float:
        """Dollars for the functions' time so far."""
        return sum(
            self._seconds(function, {}) * function.started.usd_s
            for post in self._posts.values()
            for function in post.functions
        )

    def bill(self) -> Bill:
        """What the functions took, all of them having ended; the requests of those that died without a word are not
        known.
        """
        reports = {(report.worker, report.attempt): report for report in self.reports()}
        functions = [function for post in self._posts.values() for function in post.functions]
        seconds = [self._seconds(function, reports) for function in functions]
        puts, gets = (sum(getattr(report, name) for report in reports.values()) for name in ("puts", "gets"))
        prices = self._prices
        request_usd = puts * prices.price_put_usd + gets * prices.price_get_usd
        return Bill(
            platform=prices.name,
            functions=len(functions),
            function_seconds=sum(seconds),
            puts=puts,
            gets=gets,
            compute_usd=sum(s * function.started.usd_s for s, function in zip(seconds, functions, strict=True)),
            request_usd=request_usd + len(functions) * prices.price_invocation_usd,
        )

    def _seconds(self, function: _Function, reports: Mapping[tuple[str, int], WorkerReport]) -> float:
        """How long a function has run: of one that another started, it knows that better itself."""
        seen_s = (function.ended_s or time.monotonic()) - function.began_s
        report = reports.get((function.started.worker, function.started.attempt))
        return max(seen_s, report.alive_s) if report is not None else seen_s

    def _invoke(self, post: _Post, spec: WorkerSpec) -> None:
        now_s = time.monotonic()
        post.functions.append(_Function(start(self._platform, self.storage, self.keys, spec), now_s))
        post.sign_s = now_s

    def _tend(self, post: _Post) -> None:
        function = post.functions[-1]
        status = self._status(function.started)
        if status.state is State.RUNNING:
            if self._is_silent(post):
                self._restart(post, "has not been heard of any more")
            return
        function.ended_s = time.monotonic()
        report = self._report(post.spec.worker, function.started.attempt)
        if report is not None and report.outcome in (Outcome.FINISHED, Outcome.HALTED):
            post.outcome = report.outcome
        elif report is not None and report.outcome is Outcome.FAILED and not report.retryable:
            if not report.out_of_memory:
                raise self._worst()
            self._out_of_memory(post, report.peak_memory_bytes)
        elif status.cause is Cause.OUT_OF_MEMORY:
            self._out_of_memory(post, status.peak_bytes or 0)
        elif not self._adopt(post):
            self._restart(post, how_it_ended(function.started.handle, status, report))

    def _status(self, function: Started) -> Status:
        try:
            return self._platform.status(function.handle)
        except PlatformError as error:
            return Status(state=State.FAILED, reason=f"is not known any more: {error}")

    def _is_silent(self, post: _Post) -> bool:
        """Whether a function is asleep, or never began: neither its lease nor the platform may tell."""
        life, now_s = post.spec.life, time.monotonic()
        if now_s - post.looked_s < life.heartbeat_s:
            return False
        post.looked_s = now_s
        sign = self._sign(post)
        if sign != post.sign:
            post.sign, post.sign_s = sign, now_s
        begun = post.sign[0] == post.functions[-1].started.attempt
        patience_s = life.lease_s + 2 * life.heartbeat_s if begun else life.cold_start_s + life.start_s
        if post.spec.follows_within_s is not None and not begun:
            patience_s += post.spec.follows_within_s
        return now_s - post.sign_s > patience_s

    def _sign(self, post: _Post) -> tuple[int, int]:
        try:
            heartbeat = get_document(self.storage, Heartbeat, self.keys.heartbeat(post.spec.worker))
        except KeyMissing:
            return post.sign
        post.peak_bytes = max(post.peak_bytes, heartbeat.memory_bytes)
        return heartbeat.attempt, heartbeat.beat

    def _adopt(self, post: _Post) -> bool:
        """Watch the function that goes on, if there is one: a successor, or whoever came first as this attempt."""
        known = {function.started.handle.name: function for function in post.functions}
        for found in reversed(started(self.storage, self.keys, post.spec.worker)):
            status = self._status(found)
            if status.state is State.FAILED:
                continue
            report = self._report(found.worker, found.attempt)
            if status.state is State.DONE and (report is None or report.outcome is Outcome.HANDED_OVER):
                continue
            function = known.get(found.handle.name) or _Function(found, time.monotonic())
            post.functions = [other for other in post.functions if other is not function] + [function]
            post.sign_s = time.monotonic()
            return True
        return False

    def _restart(self, post: _Post, why: str) -> None:
        post.restarts += 1
        if post.restarts > RESTARTS:
            raise self._worst(f"worker {post.spec.worker} {why}, {post.restarts} times without a step in between")
        newest = newest_attempt(self.storage, self.keys, post.spec.worker)
        elapsed_s = time.monotonic() - self._began_s
        first = post.spec.life
        life = replace(first, spent_usd=first.spent_usd + self.cost_usd(), elapsed_s=first.elapsed_s + elapsed_s)
        attempt = 0 if newest is None else newest + 1
        _log.warning("worker %s %s: it is started again, as attempt %d", post.spec.worker, why, attempt)
        self._invoke(post, replace(post.spec, attempt=attempt, life=life))

    def _out_of_memory(self, post: _Post, peak_bytes: int) -> None:
        """Give the stage a larger function, if that is wanted and there is one."""
        number = post.spec.stage
        stage = post.spec.plan.stages[number]
        self._sign(post)
        peak = max(post.peak_bytes, peak_bytes)
        message = f"worker {post.spec.worker} ran out of memory: peak {peak / MB:.0f} of {stage.memory_mb} MB"
        larger = [size for size in self._prices.sizes if size.memory_mb > stage.memory_mb]
        if self._on_oom is OnOutOfMemory.FAIL or not larger:
            hint = "there is no larger function" if not larger else "--on-oom grow goes on with a larger function"
            raise WorkerFailed(
                f"run {self.keys.run}: {message}; {hint}, smaller micro-batches or --recompute auto need less"
            )
        grown = replace(stage, size=larger[0].name, memory_mb=larger[0].memory_mb)
        for other in self._posts.values():
            stages = tuple(grown if i == number else s for i, s in enumerate(other.spec.plan.stages))
            life = other.spec.life
            if other.spec.stage == number:
                life = replace(life, usd_s=larger[0].price_usd_s)
            other.spec = replace(other.spec, plan=replace(other.spec.plan, stages=stages), life=life)
            put_document(self.storage, self.keys.payload(other.spec.worker), other.spec)
        self._restart(post, message)

    def _report(self, worker: str, attempt: int) -> WorkerReport | None:
        try:
            return get_document(self.storage, WorkerReport, self.keys.worker_report(worker, attempt))
        except KeyMissing:
            return None

    def _explain_halt(self) -> None:
        """Raise the failure that ended the run, or why it was ended."""
        failed = [report for report in self.reports() if report.outcome is Outcome.FAILED and not report.retryable]
        if failed:
            raise self._worst()
        if all(post.outcome is not None for post in self._posts.values()):
            halt = standing_order(self.storage, self.keys)
            reason = halt.reason if halt is not None else "its order to end is gone"
            raise RunHalted(f"run {self.keys.run} was ended: {reason}")

    def _worst(self, otherwise: str = "failed") -> WorkerFailed:
        return worst(self.keys.run, self.reports(), otherwise)
