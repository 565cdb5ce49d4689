"""The liveness of a run: the state of each worker's newest function, by report, platform and heartbeat.

A report says how a function ended, the platform whether it runs, a heartbeat when it was last alive. Clocks may
differ by minutes, so a heartbeat's age proves nothing by itself. If it seems old, or the platform cannot be asked,
there is a second check after more than one interval: a worker that has sent another heartbeat meanwhile is at work.

Each attempt of a worker writes its own heartbeats, and the newest attempt's count. Those of attempts that left no
report stay: they are all that is known of the requests of one that died.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from funcpipe.core import FaultTolerance, Heartbeat, Outcome, RunRecord, WorkerReport, WorkerSpec, worker_name
from funcpipe.errors import CorruptMessage, InputError, KeyMissing, PlatformError
from funcpipe.platforms.base import OpenPlatform, Platform, State, Status, Storage
from funcpipe.platforms.function_group import StartedFunction
from funcpipe.runstate.documents import POLL_S, READS, find_readable_document, get_document, side_by_side
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.keys import Keys, newest_attempts
from funcpipe.runstate.lease import LastAttempt, last_attempts

_log = logging.getLogger(__name__)

READ_AT_ONCE = 16
"""The heartbeats of many workers that are read after a listing, those of one worker after another's."""


def newest_heartbeat(storage: Storage, keys: Keys, worker: str) -> Heartbeat | None:
    """The last heartbeat of the newest attempt of `worker` that has sent one; None if it is missing or damaged."""
    for _ in range(READS):
        found = storage.list(keys.heartbeats(worker))
        if not found:
            return None
        try:
            return get_document(storage, Heartbeat, found[-1])
        except KeyMissing:
            _log.debug("%s was deleted since it was listed; a later attempt has begun", found[-1])
        except CorruptMessage as error:
            _log.warning("does without a heartbeat: %s", error)
            return None
    return None


def attempt_of(keys: Keys, key: str) -> tuple[str, int]:
    """Return the worker, and its attempt, whose heartbeat has the key `key`."""
    worker, _, attempt = key.removeprefix(keys.all_heartbeats).partition("/")
    return worker, int(attempt)


class WorkerState(Enum):
    """The state of a worker. The last three are ends that no other attempt follows."""

    STARTING = "starting"
    WORKING = "working"
    SILENT = "silent"
    DEAD = "dead"
    FINISHED = "finished"
    HALTED = "halted"
    FAILED = "failed"


_AT_WORK = (WorkerState.STARTING, WorkerState.WORKING)
_LOST = (WorkerState.SILENT, WorkerState.DEAD)
_ENDS = {Outcome.FINISHED: WorkerState.FINISHED, Outcome.HALTED: WorkerState.HALTED, Outcome.FAILED: WorkerState.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLiveness:
    """The liveness of a worker: its newest attempt, its last heartbeat, and the report of how it ended.

    `seen_ago_s` is the age of the newest sign of life, by the clock of its machine and the one of this process; None if
    there is none. `reason` says how a function ended that left no report, where the platform knows; `unasked` says
    that the platform could not be asked.
    """

    worker: str
    state: WorkerState
    attempt: int = 0
    beat: Heartbeat | None = None
    report: WorkerReport | None = None
    seen_ago_s: float | None = None
    reason: str = ""
    unasked: bool = False

    @property
    def at_work(self) -> bool:
        """True if a function is this worker, or is about to be."""
        return self.state in _AT_WORK

    @property
    def lost(self) -> bool:
        """True if its work is not done, and no function seems to do it."""
        return self.state in _LOST


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLiveness:
    """The liveness of all workers of a run, in order of stages and replicas."""

    workers: tuple[WorkerLiveness, ...]

    @property
    def is_dead(self) -> bool:
        """True if work is left, and no function does it or will restart another one."""
        return any(worker.lost for worker in self.workers) and not any(worker.at_work for worker in self.workers)

    @property
    def lost(self) -> tuple[WorkerLiveness, ...]:
        """The workers whose work no function does."""
        return tuple(worker for worker in self.workers if worker.lost)

    def ended(self, *states: WorkerState) -> bool:
        """Return True if all workers have ended in one of these states."""
        return bool(self.workers) and all(worker.state in states for worker in self.workers)

    @property
    def last_seen_at_s(self) -> float | None:
        """The time of the last sign of life of any function, by its own clock."""
        beats = [worker.beat.sent_at_s for worker in self.workers if worker.beat is not None]
        reports = [worker.report.ended_at_s for worker in self.workers if worker.report is not None]
        return max([*beats, *reports], default=None)


def _silent_after_s(faults: FaultTolerance) -> float:
    """Return the seconds of silence after which a function counts as lost."""
    return faults.lease_s + 3 * faults.heartbeat_s + 2 * faults.cold_start_s


def find_liveness(
    storage: Storage,
    record: RunRecord,
    open_platform: OpenPlatform | None = None,
    *,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
    heartbeats: "HeartbeatReader | None" = None,
) -> RunLiveness:
    """Return the liveness of the run. A second check, if needed, takes until two heartbeats should have come.

    With `heartbeats`, which have been read before, those of many workers at work are not all read.
    """
    keys, workers = Keys.of(record), worker_names(record)
    faults, heartbeats = _faults(storage, keys), heartbeats or HeartbeatReader(storage, keys, clock=clock)
    functions: dict[str, list[StartedFunction]] = {}
    for function in list_functions(storage, keys):
        functions.setdefault(function.worker, []).append(function)
    platform = _opened(record, open_platform)
    heartbeats.list()
    awake = heartbeats.awake(faults.lease_s + 2 * faults.heartbeat_s)
    heartbeats.read(worker for worker in workers if worker not in awake)
    beats = heartbeats.beats
    begun = {worker: beat.attempt for worker, beat in beats.items()}
    lasts, now_s = last_attempts(storage, keys, workers, begun=begun), clock()

    def check(worker: str) -> WorkerLiveness:
        signs = _Signs(worker, beats.get(worker), functions.get(worker, ()), platform, awake.get(worker))
        return _check(storage, keys, signs, lasts[worker], faults, now_s)

    found = side_by_side(check, workers)
    return RunLiveness(workers=_check_again(storage, keys, found, faults, pause, heartbeats.etags))


def all_finished(storage: Storage, record: RunRecord) -> bool:
    """Return True if every worker of the run has done its last step: none is restarted, and none needs to be."""
    lasts = last_attempts(storage, Keys.of(record), worker_names(record)).values()
    return all(last is not None and last.ended is Outcome.FINISHED for last in lasts)


def worker_names(record: RunRecord) -> tuple[str, ...]:
    """Return the workers of a run, in order of stages and replicas."""
    plan = record.plan
    return tuple(worker_name(stage, replica) for stage in range(len(plan.stages)) for replica in range(plan.replicas))


def read_heartbeats(storage: Storage, record: RunRecord) -> list[Heartbeat | None]:
    """The last heartbeat of each worker, in order of stages and replicas; None for a worker that has sent none."""
    return list(heartbeats_of(storage, Keys.of(record), worker_names(record)).values())


def heartbeats_of(
    storage: Storage, keys: Keys, workers: Sequence[str], *, listed: Iterable[str] | None = None
) -> dict[str, Heartbeat | None]:
    """Return the last heartbeat of each of `workers`, by one listing, which is made here unless it is given."""
    found = storage.list(keys.all_heartbeats) if listed is None else listed
    newest = newest_attempts(found, keys.all_heartbeats)

    def read(worker: str) -> Heartbeat | None:
        if worker not in newest:
            return None
        try:
            return get_document(storage, Heartbeat, newest[worker][1])
        except KeyMissing:  # deleted since it was listed, as a later attempt has begun
            return newest_heartbeat(storage, keys, worker)
        except CorruptMessage as error:
            _log.warning("does without a heartbeat: %s", error)
            return None

    return dict(zip(workers, side_by_side(read, workers), strict=True))


class HeartbeatReader:
    """The newest heartbeats of a run's workers, listing by listing: one listing says which are new, and few are read.

    `beats` are the last that were read, by worker, and `etags` those of the last listing.
    """

    def __init__(self, storage: Storage, keys: Keys, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage, self._keys, self._clock = storage, keys, clock
        self.beats: dict[str, Heartbeat] = {}
        self.etags: Mapping[str, str] = {}
        self._newest: dict[str, tuple[int, str]] = {}
        self._unread: dict[str, str] = {}
        self._listed_s: float | None = None
        self._alive_s: dict[str, float] = {}

    def list(self) -> dict[str, int]:
        """List heartbeats; return the attempts of the workers that have sent one since they were last listed."""
        before, before_s, listed_s = self.etags, self._listed_s, self._clock()
        self.etags, self._listed_s = self._storage.etags(self._keys.all_heartbeats), listed_s
        self._newest = newest_attempts(self.etags, self._keys.all_heartbeats)
        new = {worker: key for worker, (_, key) in self._newest.items() if before.get(key) != self.etags[key]}
        self._unread |= new
        if before_s is not None:
            self._alive_s |= dict.fromkeys(new, before_s)
        return {worker: self._newest[worker][0] for worker in new}

    def read(self, also: Iterable[str] = ()) -> dict[str, Heartbeat]:
        """Read new heartbeats: of READ_AT_ONCE workers, in turn, and of those in `also`; return them by worker."""
        wanted = [*list(self._unread)[:READ_AT_ONCE], *(worker for worker in also if worker in self._unread)]
        keys = {worker: self._unread.pop(worker) for worker in dict.fromkeys(wanted)}
        found = heartbeats_of(self._storage, self._keys, tuple(keys), listed=keys.values())
        read = {worker: beat for worker, beat in found.items() if beat is not None}
        self.beats |= read
        return read

    def awake(self, within_s: float) -> dict[str, float]:
        """Return the workers, of many, that have sent a heartbeat within so many seconds before the last listing.

        With each comes how long ago that was at most. One of whose newest attempt no heartbeat was read is left out.
        """
        if self._listed_s is None or len(self._newest) <= READ_AT_ONCE:
            return {}
        known = {worker: beat.attempt for worker, beat in self.beats.items()}
        ago_s = {worker: self._listed_s - alive_s for worker, alive_s in self._alive_s.items()}
        return {w: s for w, s in ago_s.items() if 0 <= s <= within_s and known.get(w) == self._newest.get(w, (-1,))[0]}


@dataclass(frozen=True)
class _Signs:
    """The signs of life of one worker, besides reports. It is awake if it is known to be since `awake_ago_s`."""

    worker: str
    beat: Heartbeat | None
    functions: Sequence[StartedFunction]
    platform: Platform | None
    awake_ago_s: float | None = None

    @property
    def attempt(self) -> int:
        """The newest attempt that was started or has sent a heartbeat."""
        beaten = -1 if self.beat is None else self.beat.attempt
        return max([0, beaten, *(function.attempt for function in self.functions)])

    def statuses(self) -> list[Status] | None:
        """Return the platform's status of all functions that can still be the worker; None if it cannot be asked."""
        if self.platform is None or not self.functions:
            return None
        first = self.attempt if self.beat is None else self.beat.attempt
        try:
            return [self.platform.status(f.handle) for f in self.functions if f.attempt >= first] or None
        except PlatformError:
            return None


def _check(
    storage: Storage, keys: Keys, signs: _Signs, last: LastAttempt | None, faults: FaultTolerance, now_s: float
) -> WorkerLiveness:
    liveness = WorkerLiveness(worker=signs.worker, state=WorkerState.DEAD, attempt=signs.attempt, beat=signs.beat)
    ended = None if last is None else last.ended
    attempt = last.attempt if last is not None and ended is not None else signs.attempt
    report = find_readable_document(storage, WorkerReport, keys.worker_report(signs.worker, attempt))
    seen_ago_s = None if report is None else now_s - report.ended_at_s
    if ended is not None:  # a successor that waits is not needed any more
        return replace(liveness, attempt=attempt, report=report, seen_ago_s=seen_ago_s, state=_ENDS[ended])
    if report is not None and report.outcome is Outcome.FAILED:
        return replace(liveness, report=report, seen_ago_s=seen_ago_s)
    return _unreported(liveness, signs, faults, now_s)


def _unreported(liveness: WorkerLiveness, signs: _Signs, faults: FaultTolerance, now_s: float) -> WorkerLiveness:
    """Return the liveness of a worker whose newest attempt has left no report."""
    if signs.awake_ago_s is not None:
        return replace(liveness, state=WorkerState.WORKING, seen_ago_s=signs.awake_ago_s)
    beat, newest = liveness.beat, max(signs.functions, key=lambda function: function.attempt, default=None)
    begun = beat is not None and beat.attempt == liveness.attempt
    beat_age_s = None if beat is None else now_s - beat.sent_at_s
    start_age_s = None if newest is None or begun else now_s - newest.started_at_s
    ages_s = [age_s for age_s in (beat_age_s, start_age_s) if age_s is not None]
    statuses = signs.statuses()
    liveness = replace(liveness, seen_ago_s=min(ages_s, default=None), unasked=statuses is None)
    if statuses is not None and not any(status.state is State.RUNNING for status in statuses):
        return replace(liveness, reason=statuses[-1].reason)

    def fresh(age_s: float | None, limit_s: float) -> bool:
        return age_s is not None and -2 * faults.heartbeat_s <= age_s <= limit_s

    if statuses is not None and fresh(beat_age_s, _silent_after_s(faults)):
        return replace(liveness, state=WorkerState.WORKING)
    if fresh(start_age_s, faults.start_s + 2 * faults.cold_start_s):
        return replace(liveness, state=WorkerState.STARTING)
    return replace(liveness, state=WorkerState.SILENT)


def _check_again(
    storage: Storage,
    keys: Keys,
    first: Sequence[WorkerLiveness],
    faults: FaultTolerance,
    pause: Callable[[float], None],
    etags: Mapping[str, str],
) -> tuple[WorkerLiveness, ...]:
    """Count workers as at work that seemed silent, but have sent a heartbeat since heartbeats had these `etags`."""
    found = {liveness.worker: liveness for liveness in first}
    silent = [liveness for liveness in first if liveness.state is WorkerState.SILENT]
    waited_s = 0.0
    while silent and waited_s < 2 * faults.heartbeat_s:
        pause(min(POLL_S, faults.heartbeat_s))
        waited_s += min(POLL_S, faults.heartbeat_s)
        new = {attempt_of(keys, key)[0] for key, etag in storage.etags(keys.all_heartbeats).items() - etags.items()}
        for liveness in (liveness for liveness in silent if liveness.worker in new):
            beat = newest_heartbeat(storage, keys, liveness.worker)
            if beat is not None and beat != liveness.beat:
                awake = replace(liveness, state=WorkerState.WORKING, attempt=beat.attempt, beat=beat, seen_ago_s=0.0)
                found[liveness.worker] = awake
        silent = [liveness for liveness in silent if found[liveness.worker] is liveness]
    return tuple(found.values())


def _opened(record: RunRecord, open_platform: OpenPlatform | None) -> Platform | None:
    """Return the run's platform, if it can be opened from here."""
    try:
        return None if open_platform is None else open_platform(record.platform)
    except (PlatformError, InputError):
        return None


def _faults(storage: Storage, keys: Keys) -> FaultTolerance:
    spec = find_readable_document(storage, WorkerSpec, keys.payload(worker_name(0, 0)))
    return FaultTolerance() if spec is None else spec.faults
