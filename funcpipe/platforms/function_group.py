"""Functions on a platform, from start to end, as a process sees them that starts or watches them.

    start ──> runs ──> has ended        done, failed or out of memory, as the platform says
      ↑        └─────> is lost          silent, or not known to the platform any more
      └─ Restarts: at once, then after growing pauses, MAX_RESTARTS times without progress in between

Clients of runs and of parameter servers, and profilers, lead groups. What a lost function means to them, and how they
notice that one is silent, is their own.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import ClassVar, Self

from funcpipe.core import Invocation
from funcpipe.core.backoff import Backoff
from funcpipe.core.run import FunctionSpec
from funcpipe.errors import PlatformBusy, PlatformError
from funcpipe.platforms.base import Handle, Platform, State, Status

_log = logging.getLogger(__name__)

START_WITHIN_S = 300.0
"""A function that a busy platform has not started by then is given up."""

_BUSY_PAUSES = Backoff(first_s=2.0, most_s=20.0)

MAX_RESTARTS = 5
"""The restarts of a worker without progress; after that it is given up."""

RESTART_PAUSES = Backoff(first_s=2.0, most_s=30.0)
"""The pauses before a worker is restarted again without progress; the first restart comes at once."""

_STOPS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedFunction:
    """A function that was started for an attempt of a worker, with its price per second, if known, and its memory.

    It was started at `started_at_s` by the clock of who started it; 0 if that was not recorded. `token` is its own in
    the storage of its run.
    """

    FORMAT: ClassVar[str] = "funcpipe.function/1"

    worker: str
    attempt: int
    handle: Handle
    usd_s: float
    memory_mb: int | None = None
    started_at_s: float = 0.0
    token: str = ""


@dataclass(eq=False)
class WatchedFunction:
    """A function that this process has known of since `since_s`, when it was `age_s` old, and that ended at `ended_s`.

    Times are by this process's clock; `status` is what the platform last said. A function that `is_unknown` to it, and
    could not be stopped, may still run, and counts until it is stopped.
    """

    started: StartedFunction
    since_s: float
    age_s: float = 0.0
    ended_s: float | None = None
    status: Status | None = None
    is_unknown: bool = False
    clock: Callable[[], float] = time.monotonic

    def seconds(self) -> float:
        """Return the seconds that it has run, as far as is known here."""
        return self.age_s + self.watched_s()

    def watched_s(self) -> float:
        """Return the seconds of that since this process has known of it."""
        return (self.clock() if self.ended_s is None else self.ended_s) - self.since_s

    def has_ended(self) -> None:
        """Note that it has ended by now."""
        if self.ended_s is None:
            self.ended_s = self.clock()

    @property
    def runs(self) -> bool:
        """True if it runs, as far as is known here."""
        return self.ended_s is None and not self.is_unknown

    def from_its_start(self) -> "WatchedFunction":
        """Return it as known from its start: it began while this process watched its worker."""
        return replace(self, since_s=self.since_s - self.age_s, age_s=0.0)


@dataclass
class Restarts:
    """The restarts of one worker since it last made progress; the next one, for `cause`, is due at `due_s`."""

    count: int = 0
    due_s: float | None = None
    cause: str = ""

    def add(self, cause: str) -> float:
        """Count one more; return the pause before it."""
        self.count, self.cause = self.count + 1, cause
        return RESTART_PAUSES.pause_s(self.count - 1) if self.count > 1 else 0.0

    @property
    def are_exhausted(self) -> bool:
        """True if the worker is to be given up."""
        return self.count > MAX_RESTARTS

    def take_due(self, now_s: float) -> bool:
        """Return True, once, when the next restart is due."""
        if self.due_s is None or now_s < self.due_s:
            return False
        self.due_s = None
        return True


class FunctionGroup:
    """The functions that one process leads: started here, or taken in; all that run are ended on exit."""

    def __init__(self, platform: Platform, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.platform = platform
        self._functions: dict[str, list[WatchedFunction]] = {}
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, spec: Invocation, *, sleep: Callable[[float], object] | None = None) -> WatchedFunction:
        """Start a function, as `started_on` does."""
        now_s = self._clock()
        return self.watch(WatchedFunction(started_on(self.platform, spec, sleep=sleep), now_s, clock=self._clock))

    def watch(self, function: WatchedFunction) -> WatchedFunction:
        """Take in `function`, which is now its worker's newest."""
        known = self._functions.setdefault(function.started.worker, [])
        known[:] = [other for other in known if other is not function] + [function]
        return function

    @property
    def functions(self) -> Sequence[WatchedFunction]:
        """The functions of all workers."""
        return [function for own in self._functions.values() for function in own]

    def of(self, worker: str) -> Sequence[WatchedFunction]:
        """Return the functions that were or are `worker`, the newest last."""
        return list(self._functions.get(worker, ()))

    @property
    def running(self) -> Sequence[WatchedFunction]:
        """The functions that run, as far as is known here."""
        return [function for function in self.functions if function.runs]

    @property
    def left(self) -> Sequence[WatchedFunction]:
        """The functions that run, or may do so, as the platform could neither say nor stop them."""
        return [function for function in self.functions if function.ended_s is None]

    def poll(self, function: WatchedFunction) -> Status:
        """Return the function's state; note its end.

        One of which the platform cannot say it has failed. It is stopped, so that it does not run on beside another in
        its place.
        """
        handle = function.started.handle
        try:
            status, function.is_unknown = self.platform.status(handle), False
        except PlatformError as error:
            status, function.is_unknown = _unknown(error), not stop_functions(self.platform, [handle])
        function.status = status
        if status.state is not State.RUNNING and not function.is_unknown:
            function.has_ended()
        return status

    def runs(self, started: StartedFunction) -> bool | None:
        """Return True if any function, of this group or not, still runs; None if the platform cannot say."""
        try:
            return self.platform.status(started.handle).state is State.RUNNING
        except PlatformError as error:
            name, worker = started.handle.name, started.worker
            _log.warning("function %s of worker %s may still run, as its platform cannot say: %s", name, worker, error)
            return None

    def stop(self, functions: Iterable[WatchedFunction] | None = None) -> None:
        """End `functions`, by default all that are `left`."""
        stopped = list(self.left if functions is None else functions)
        stop_functions(self.platform, [function.started.handle for function in stopped])
        for function in stopped:
            function.has_ended()


def _unknown(error: PlatformError) -> Status:
    return Status(state=State.FAILED, reason=f"is not known any more: {error}")


def started_on(
    platform: Platform, spec: Invocation, *, usd_s: float = 0.0, sleep: Callable[[float], object] | None = None
) -> StartedFunction:
    """Start a function, and `sleep`, if given, while the platform is busy. Raises PlatformError or PlatformRefused."""
    at_s = time.time()
    handle = platform.invoke(_invoked_now(spec)) if sleep is None else invoke_with_retry(platform, spec, sleep=sleep)
    _log.info("started function %s as attempt %d of worker %s", handle.name, spec.attempt, spec.worker)
    return StartedFunction(
        worker=spec.worker,
        attempt=spec.attempt,
        handle=handle,
        usd_s=usd_s,
        memory_mb=spec.memory_mb,
        started_at_s=at_s,
    )


def _invoked_now(spec: Invocation) -> Invocation:
    return replace(spec, invoked_at_s=time.time()) if isinstance(spec, FunctionSpec) else spec


def invoke_with_retry(
    platform: Platform,
    worker: Invocation,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Handle:
    """Start a function as a client does, which can wait: after a pause again while the platform is busy.

    Raises PlatformBusy after START_WITHIN_S, and whatever else `Platform.invoke` raises at once.
    """
    until_s = clock() + START_WITHIN_S
    for tries in itertools.count(1):
        try:
            return platform.invoke(_invoked_now(worker))
        except PlatformBusy as error:
            left_s = until_s - clock()
            if left_s <= 0:
                raise
            _log.warning(
                "worker %s cannot be started for now; tried again, for %.0f s more: %s", worker.worker, left_s, error
            )
            sleep(max(_BUSY_PAUSES.pause_s(tries), 0.1))
    raise AssertionError("the count never ends")


def stop_functions(platform: Platform, handles: Iterable[Handle]) -> bool:
    """Stop functions in parallel, as a cloud may take seconds for each; return True if all could be stopped."""

    def stop(handle: Handle) -> bool:
        try:
            platform.stop(handle)
        except PlatformError as error:
            _log.warning("function %s of worker %s may still run and cost money: %s", handle.name, handle.worker, error)
            return False
        return True

    with ThreadPoolExecutor(_STOPS_AT_ONCE) as pool:
        return all(list(pool.map(stop, handles)))
