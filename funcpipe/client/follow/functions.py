"""The functions of a run as their client sees them, and the worker that several of them are one after another."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from funcpipe.core import CountsByKind, Heartbeat, Outcome, WorkerSpec
from funcpipe.errors import Superseded
from funcpipe.platforms.base import Platform, Storage
from funcpipe.platforms.function_group import Restarts, StartedFunction, WatchedFunction, stop_functions
from funcpipe.runstate.documents import POLL_S
from funcpipe.runstate.functions import list_functions, start_function
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.liveness import newest_heartbeat

_LEAVING_S = 90.0
"""The wait of a client that has lost its run for the functions, which may be processes of its own."""


@dataclass
class WatchedWorker:
    """A worker: its `restarts` since a step of the run last ended, and what its heartbeats say.

    `beat` is the last heartbeat that was seen, by attempt and number, and `beat_seen_s` when it was new; heartbeats
    were last polled at `polled_s`. By them it runs in a function of `memory_mb`, and has used `peak_bytes` at most;
    `requests` are those of each attempt.
    """

    spec: WorkerSpec
    outcome: Outcome | None = None
    restarts: Restarts = field(default_factory=Restarts)
    beat: tuple[int, int] = (-1, 0)
    beat_seen_s: float = 0.0
    polled_s: float = 0.0
    peak_bytes: int = 0
    memory_mb: int | None = None
    requests: dict[int, CountsByKind] = field(default_factory=dict)

    def receive(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Take in the worker's last heartbeat as of `now_s`."""
        self.peak_bytes = max(self.peak_bytes, heartbeat.memory_bytes)
        self.memory_mb = heartbeat.memory_mb
        self.requests[heartbeat.attempt] = heartbeat.counts
        beat = heartbeat.attempt, heartbeat.beat
        if beat != self.beat:
            self.beat, self.beat_seen_s = beat, now_s

    def is_silent(self, attempt: int, now_s: float) -> bool:
        """Return True if its function, that `attempt`, is asleep or never began: no heartbeat came for too long."""
        faults = self.spec.faults
        if self.beat[0] == attempt:
            return now_s - self.beat_seen_s > faults.lease_s + 2 * faults.heartbeat_s
        return now_s - self.beat_seen_s > faults.cold_start_s + faults.start_s + (self.spec.follows_within_s or 0.0)


def _function_seconds(functions: Sequence[StartedFunction], beat: Heartbeat | None) -> list[float]:
    """Seconds that each function of one worker ran, as far as storage shows; functions are in order of their start.

    One ran at least until its last heartbeat, `beat`, or else until the next one was started in its place. A heartbeat
    has the age of its function, so that the clocks of different machines are not compared. 0 is unknown.
    """
    seconds = [
        0.0 if after is None or not function.started_at_s else max(after.started_at_s - function.started_at_s, 0.0)
        for function, after in zip(functions, (*functions[1:], None), strict=False)
    ]
    beating = [number for number, function in enumerate(functions) if beat and function.attempt == beat.attempt]
    if beat is not None and beating:  # of several functions that were started as one attempt, the last was probably it
        seconds[beating[-1]] = beat.alive_s
    return seconds


def joined(function: StartedFunction, beat: Heartbeat | None) -> WatchedFunction:
    """A function that runs, as a client sees it that did not start it. The age in its worker's last heartbeat, `beat`,
    goes before clocks.
    """
    if beat is not None and beat.attempt == function.attempt:
        age_s = beat.alive_s
    else:
        age_s = max(time.time() - function.started_at_s, 0.0) if function.started_at_s else 0.0
    return WatchedFunction(function, time.monotonic(), age_s)


def attached(
    storage: Storage, keys: Keys, worker: str, runs: Callable[[StartedFunction], bool | None]
) -> list[WatchedFunction]:
    """The functions of a worker that others have started; `runs` says which of them still run, None of one that may."""
    started, now_s = list_functions(storage, keys, worker), time.monotonic()
    beat = newest_heartbeat(storage, keys, worker)
    ran_s = _function_seconds(started, beat)
    found = []
    for function, seconds in zip(started, ran_s, strict=True):
        match runs(function):
            case True:
                found.append(joined(function, beat))
            case False:
                found.append(WatchedFunction(function, now_s, seconds, ended_s=now_s))
            case None:
                found.append(replace(joined(function, beat), is_unknown=True))
    return found


def unwatched_functions(storage: Storage, keys: Keys, watched: Sequence[WatchedFunction] = ()) -> list[WatchedFunction]:
    """The functions of a run that has ended which are not among those that this client has `watched`."""
    names = {function.started.handle.name for function in watched}
    now_s, found = time.monotonic(), []
    for worker, functions in groupby(list_functions(storage, keys), key=lambda function: function.worker):
        own = tuple(functions)
        for function, seconds in zip(own, _function_seconds(own, newest_heartbeat(storage, keys, worker)), strict=True):
            if function.handle.name not in names:
                found.append(WatchedFunction(function, now_s, age_s=seconds, ended_s=now_s))
    return found


def start_as_owner(
    platform: Platform,
    storage: Storage,
    keys: Keys,
    spec: WorkerSpec,
    check_owner: Callable[[], None],
    *,
    sleep: Callable[[float], object],
) -> StartedFunction:
    """Start a function, and `sleep` while the platform is busy.

    `check_owner` raises Superseded if another client owns the run, and then no function is left. It asks again once the
    function is recorded: a client that took over before that may not have seen the function.
    """
    check_owner()
    begun = start_function(platform, storage, keys, spec, sleep=sleep)
    try:
        check_owner()
    except Superseded:
        stop_functions(platform, [begun.handle])
        raise
    return begun


def await_end(any_runs: Callable[[], bool]) -> None:
    """Wait for functions that another client has taken over; not for ever, as that client ends those that go on."""
    until_s = time.monotonic() + _LEAVING_S
    while any_runs() and time.monotonic() < until_s:
        time.sleep(POLL_S)
