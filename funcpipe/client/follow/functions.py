"""The functions of a run as their client sees them, and the worker that several of them are one after another."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from funcpipe.core import CountsByKind, Heartbeat, Outcome, WorkerSpec
from funcpipe.errors import Superseded
from funcpipe.platforms.base import Platform, Storage
from funcpipe.platforms.function_group import Restarts, StartedFunction, WatchedFunction, stop_functions
from funcpipe.runstate.documents import POLL_S, side_by_side
from funcpipe.runstate.functions import OUT_OF_REACH_S, list_functions, start_function
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.liveness import READ_AT_ONCE, HeartbeatReader, heartbeats_of

_LEAVING_S = 90.0
"""The wait of a client that has lost its run for the functions, which may be processes of its own."""


@dataclass
class WatchedWorker:
    """A worker: its `restarts` since a step of the run last ended, and what its heartbeats say.

    The last one that was seen, new at `beat_seen_s`, was of `beat_attempt`. By those that were read it runs in a
    function of `memory_mb`, and has used `peak_bytes` at most, and `device_bytes` of an accelerator; `requests` are
    those of each attempt.
    """

    spec: WorkerSpec
    outcome: Outcome | None = None
    restarts: Restarts = field(default_factory=Restarts)
    beat_attempt: int = -1
    beat_seen_s: float = 0.0
    peak_bytes: int = 0
    device_bytes: int = 0
    memory_mb: int | None = None
    requests: dict[int, CountsByKind] = field(default_factory=dict)

    def receive(self, heartbeat: Heartbeat) -> None:
        """Take in what a heartbeat of the worker says."""
        self.peak_bytes = max(self.peak_bytes, heartbeat.memory_bytes)
        self.device_bytes = max(self.device_bytes, heartbeat.device_bytes)
        self.memory_mb = heartbeat.memory_mb
        self.requests[heartbeat.attempt] = heartbeat.counts

    def is_silent(self, attempt: int, now_s: float) -> bool:
        """Return True if its function, that `attempt`, is asleep or never began: no heartbeat came for too long."""
        faults = self.spec.faults
        if self.beat_attempt == attempt:
            return now_s - self.beat_seen_s > faults.lease_s + 2 * faults.heartbeat_s
        return now_s - self.beat_seen_s > faults.cold_start_s + faults.start_s + (self.spec.follows_within_s or 0.0)


class HeartbeatWatch:
    """The heartbeats of a run's `workers` as its client sees them: one listing says which are new, and few are read."""

    def __init__(
        self,
        storage: Storage,
        keys: Keys,
        workers: Mapping[str, WatchedWorker],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage, self._keys, self._workers, self._clock = storage, keys, workers, clock
        self._reader = HeartbeatReader(storage, keys, clock=clock)
        self._listed_s = -math.inf
        self.run_requests_usd = self.step_s = 0.0

    @property
    def reads_all(self) -> bool:
        """True if each heartbeat is read; of more workers than that, those of some after those of others."""
        return len(self._workers) <= READ_AT_ONCE

    def list_due(self) -> float | None:
        """List the heartbeats if that is due, and read some that are new; return when it was begun, None if it was not.

        If a listing takes long, the storage is in trouble, and no silence until then counts.
        """
        now_s = self._clock()
        every_s = min((worker.spec.faults.heartbeat_s for worker in self._workers.values()), default=math.inf)
        if now_s - self._listed_s < every_s:
            return None
        self._listed_s = now_s
        for name, attempt in self._reader.list().items():
            if name in self._workers:
                self._workers[name].beat_attempt, self._workers[name].beat_seen_s = attempt, now_s
        if self._clock() - now_s > OUT_OF_REACH_S:
            for worker in self._workers.values():
                worker.beat_seen_s = self._clock()
        for name, heartbeat in self._reader.read().items():
            if name in self._workers:
                self._receive(self._workers[name], heartbeat)
        return now_s

    def read(self, workers: Iterable[WatchedWorker]) -> None:
        """Read the newest heartbeat of each of `workers` now."""
        by_name = {worker.spec.worker: worker for worker in workers}
        for name, heartbeat in heartbeats_of(self._storage, self._keys, tuple(by_name)).items():
            self._receive(by_name[name], heartbeat)

    def _receive(self, worker: WatchedWorker, heartbeat: Heartbeat | None) -> None:
        if heartbeat is not None:
            worker.receive(heartbeat)
            self.run_requests_usd = max(self.run_requests_usd, heartbeat.run_requests_usd)
            self.step_s = max(self.step_s, heartbeat.step_s)


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


def attached(storage: Storage, keys: Keys, runs: Callable[[StartedFunction], bool | None]) -> list[WatchedFunction]:
    """The functions of a run that others have started; `runs` says which of them still run, None of one that may."""
    started, now_s = list_functions(storage, keys), time.monotonic()
    beats = heartbeats_of(storage, keys, sorted({function.worker for function in started}))
    found = []
    for (function, seconds), state in zip(_ran(started, beats), side_by_side(runs, started), strict=True):
        match state:
            case True:
                found.append(joined(function, beats[function.worker]))
            case False:
                found.append(WatchedFunction(function, now_s, seconds, ended_s=now_s))
            case None:
                found.append(replace(joined(function, beats[function.worker]), is_unknown=True))
    return found


def unwatched_functions(storage: Storage, keys: Keys, watched: Sequence[WatchedFunction] = ()) -> list[WatchedFunction]:
    """The functions of a run that has ended which are not among those that this client has `watched`."""
    names, started = {function.started.handle.name for function in watched}, list_functions(storage, keys)
    unwatched = sorted({function.worker for function in started if function.handle.name not in names})
    if not unwatched:
        return []
    beats, now_s = heartbeats_of(storage, keys, unwatched), time.monotonic()
    ran = _ran([function for function in started if function.worker in beats], beats)
    return [
        WatchedFunction(function, now_s, age_s=seconds, ended_s=now_s)
        for function, seconds in ran
        if function.handle.name not in names
    ]


def _ran(
    started: Sequence[StartedFunction], beats: Mapping[str, Heartbeat | None]
) -> list[tuple[StartedFunction, float]]:
    """Return each function with the seconds that it ran; those of a worker come one after the other."""
    found: list[tuple[StartedFunction, float]] = []
    for worker, functions in groupby(started, key=lambda function: function.worker):
        own = tuple(functions)
        found += zip(own, _function_seconds(own, beats[worker]), strict=True)
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
