"""A run seen from outside, by what it has written: its status, an early end, and the removal of all its objects."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from funcpipe.client.failures import final_failure
from funcpipe.client.verdict import Verdict, judge
from funcpipe.core import Busy, Halt, Outcome, RunRecord, WorkerReport, WorkerSpec
from funcpipe.core.run_key import RunKey
from funcpipe.errors import CorruptMessage, PlatformError, RunKeyMissing, RunUnknown
from funcpipe.platforms.base import OpenPlatform, Storage
from funcpipe.platforms.catalog import open_platform as open_by_url
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.detached import unmark_generation
from funcpipe.runstate.documents import POLL_S, find_readable_document, readable_documents
from funcpipe.runstate.functions import list_functions, stop_functions
from funcpipe.runstate.generations import find_record, list_generations, newest_record
from funcpipe.runstate.halt import halt_run, read_halt
from funcpipe.runstate.keyring import KeyFolder, signed
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import is_superseded
from funcpipe.runstate.limits import notice_steps
from funcpipe.runstate.liveness import WorkerLife, WorkerState, find_life, read_heartbeats
from funcpipe.runstate.owner import owned, told_if_taken
from funcpipe.runstate.signed_storage import key_of

_log = logging.getLogger(__name__)

_MOST_POLL_S = 2.0  # each look at whether all workers have ended is several requests
_SETTLE_S = 1.0  # then objects are deleted that functions wrote while they were ended


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a worker is doing: `outcome` is None while it is at work.

    It was last heard of `heard_s` ago, by the clock of its machine and the one of this machine; None is never.
    """

    worker: str
    state: WorkerState
    attempt: int
    outcome: Outcome | None
    step: int
    saved_step: int
    memory_bytes: int
    memory_mb: int
    spent_usd: float
    heard_s: float | None
    busy: tuple[Busy, ...]
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """What a run is doing, and what it has cost and taken since it was first started.

    `explanation` says why the `verdict` is what it is; a resumed run would continue after `saved_step`. `halt` says why
    the run ends early, if it does.
    """

    FORMAT: ClassVar[str] = "funcpipe.status/1"

    run: str
    generation: int
    steps: int
    run_usd: float
    run_s: float
    halt: str | None
    verdict: Verdict
    explanation: str
    saved_step: int
    workers: tuple[WorkerStatus, ...]

    @property
    def step(self) -> int:
        """The steps that all workers have done."""
        return min((worker.step for worker in self.workers), default=0)


def status(
    storage: Storage,
    run: str,
    open_platform: OpenPlatform = open_by_url,
    *,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] | None = None,
) -> RunStatus:
    """What the run of that name in `storage` is doing; raises RunUnknown.

    If a worker seems silent, or the platform cannot be asked, this waits with `pause` until a heartbeat must have come.
    """
    return _status(signed(storage), run, open_platform, clock=clock, pause=pause)


def _status(
    storage: Storage,
    run: str,
    open_platform: OpenPlatform,
    *,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] | None = None,
) -> RunStatus:
    record = newest_record(storage, run)
    keys = Keys.of(record)
    life = find_life(storage, record, open_platform, clock=clock, pause=pause or time.sleep)
    halt = read_halt(storage, keys)
    index = Checkpoints(storage, keys, first_step=record.first_step).index()
    saved_step = index.common_step(len(record.plan.stages), record.plan.replicas)
    verdict, explanation = judge(record, life, halt, final_failure(storage, keys), saved_step=saved_step)
    beats = [worker.beat for worker in life.workers if worker.beat is not None]
    return RunStatus(
        run=run,
        generation=record.generation,
        steps=record.steps,
        run_usd=max([beat.run_usd + beat.run_requests_usd for beat in beats], default=record.spent_usd),
        run_s=max([beat.run_s for beat in beats], default=record.elapsed_s),
        halt=None if halt is None else halt.reason,
        verdict=verdict,
        explanation=explanation,
        saved_step=saved_step,
        workers=tuple(_worker_status(record, number, worker) for number, worker in enumerate(life.workers)),
    )


def stop(
    storage: Storage,
    run: str,
    open_platform: OpenPlatform = open_by_url,
    *,
    wait_s: float = 60.0,
    reason: str = "it was stopped",
) -> RunStatus:
    """End the run after a step that all its workers can still end with, so that it can be resumed.

    Functions that still run after `wait_s` are ended at once. Raises RunUnknown.
    """
    own = signed(storage)
    end_early(own, run, open_platform, wait_s=wait_s, reason=reason)
    return _status(own, run, open_platform)


def end_early(storage: Storage, run: str, open_platform: OpenPlatform, *, wait_s: float, reason: str) -> None:
    """As `stop`, on a storage that is signed."""
    record = newest_record(storage, run)
    keys = Keys.of(record)
    beats = [beat for beat in read_heartbeats(storage, record) if beat is not None]
    specs = readable_documents(storage, WorkerSpec, storage.list(keys.payloads))
    heartbeat_s = max((spec.faults.heartbeat_s for spec in specs), default=0.0)
    step_s = min((beat.step_s for beat in beats if beat.step_s), default=None)
    done = max((beat.step for beat in beats), default=record.first_step)
    order_end(storage, keys, done=done, notice=notice_of(heartbeat_s, step_s), reason=reason)
    until_s, pause_s = time.monotonic() + wait_s, POLL_S
    while time.monotonic() < until_s and not _all_ended(storage, keys, record):
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _MOST_POLL_S)
    end_functions(storage, keys, open_platform)


def run_key(storage: Storage, run: str) -> RunKey:
    """The key of the newest generation of `run`. Raises RunUnknown, or RunKeyMissing if it was started elsewhere."""
    generations = list_generations(storage, run)
    if not generations:
        raise RunUnknown(f"there is no run {run!r} in this storage")
    return key_of(KeyFolder(), generations[-1])


def notice_of(heartbeat_s: float, step_s: float | None) -> int:
    """How many steps ahead an order to end is given; workers give one again that comes too late."""
    return notice_steps(heartbeat_s, step_s) if step_s else 1


def order_end(storage: Storage, keys: Keys, *, done: int, notice: int, reason: str) -> None:
    """Order a run that has done `done` steps to end `notice` steps later."""
    _log.info("run %s: is to end after step %d", keys.run, done + notice)
    halt_run(storage, keys, Halt(reason=reason, step=done + notice))


def clean(storage: Storage, run: str, open_platform: OpenPlatform = open_by_url, *, take_over: bool = False) -> int:
    """End all functions of the run and delete all its objects; returns how many there were.

    Raises RunUnknown, or RunTaken if another client owns the run, unless with `take_over`, or takes it over meanwhile.
    """
    if not storage.list(Keys(run).run_prefix):
        raise RunUnknown(f"there is no run {run!r} in this storage")
    with told_if_taken(run), owned(signed(storage), run, take_over=take_over) as owner:
        generations = list_generations(owner.storage, run)
        payloads = sum(len(owner.storage.list(keys.payloads)) for keys in generations)
        for keys in generations:
            end_functions(owner.storage, keys, open_platform, for_good=True)
        return payloads + owner.delete_run(settle_s=_SETTLE_S)


def end_functions(storage: Storage, keys: Keys, open_platform: OpenPlatform, *, for_good: bool = False) -> None:
    """End the functions of a generation, even of one that has no record, and let no watchdog restart them.

    Those of a platform that is gone have ended with it. With `for_good`, the generation is to be deleted: its payloads
    go first, so that who starts a function too late to be seen here knows (`start_for_worker`). Those of a generation
    whose key is not known here cannot be found: they end by themselves, once its objects are gone.
    """
    unmark_generation(storage, keys.prefix)
    payloads = storage.list(keys.payloads)
    try:
        url = _platform_of(storage, keys, payloads)
    except RunKeyMissing as error:
        if not for_good:
            raise
        storage.delete_many(payloads)
        _log.warning("run %s: functions of generation %d are left to end: %s", keys.run, keys.generation, error)
        return
    if for_good:
        storage.delete_many(payloads)
    functions = list_functions(storage, keys)
    if not functions or url is None:
        return
    _log.info("run %s: ends %d functions", keys.run, len(functions))
    try:
        stop_functions(open_platform(url), [function.handle for function in functions])
    except PlatformError as error:
        _log.info("run %s: its functions have ended with their platform: %s", keys.run, error)


def _platform_of(storage: Storage, keys: Keys, payloads: Sequence[str]) -> str | None:
    """The platform of a generation, by its record or else by a payload, if either can be read."""
    try:
        record = find_record(storage, keys)
    except CorruptMessage:
        record = None  # which was logged
    if record is not None:
        return record.platform
    return next((spec.platform for spec in readable_documents(storage, WorkerSpec, payloads)), None)


def _worker_status(record: RunRecord, number: int, life: WorkerLife) -> WorkerStatus:
    beat, report = life.beat, life.report
    stage = number // record.plan.replicas
    return WorkerStatus(
        worker=life.worker,
        state=life.state,
        attempt=life.attempt,
        outcome=report.outcome if report is not None else None,
        step=record.first_step if beat is None else beat.step,
        saved_step=record.first_step if beat is None else beat.saved_step,
        memory_bytes=0 if beat is None else beat.memory_bytes,
        memory_mb=record.plan.stages[stage].memory_mb if beat is None else beat.memory_mb,
        spent_usd=0.0 if beat is None else beat.spent_usd,
        heard_s=None if life.heard_s is None else max(life.heard_s, 0.0),
        busy=beat.busy if beat is not None and life.at_work else (),
        error=report.error if report is not None else life.reason or None,
    )


def _all_ended(storage: Storage, keys: Keys, record: RunRecord) -> bool:
    """Whether every worker has ended for good, or its last attempt has failed and nobody starts another."""
    for beat in read_heartbeats(storage, record):
        report = None if beat is None else _report(storage, keys, beat.worker, beat.attempt)
        if report is None or report.outcome is Outcome.HANDED_OVER:
            return False
    return True


def _report(storage: Storage, keys: Keys, worker: str, attempt: int) -> WorkerReport | None:
    """The report of an attempt; None if there is none, or if it says how the worker ended although it goes on."""
    report = find_readable_document(storage, WorkerReport, keys.worker_report(worker, attempt))
    if report is None or (report.is_final and is_superseded(storage, keys, worker, attempt)):
        return None
    return report
