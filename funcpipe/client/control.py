"""A run seen from outside, by what it has written: its status, an early end, and the removal of all its objects."""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from funcpipe.core import Busy, Halt, Heartbeat, Outcome, RunRecord, WorkerReport
from funcpipe.errors import KeyMissing, RunUnknown
from funcpipe.platforms.base import Platform, Storage
from funcpipe.platforms.catalog import open_platform as open_by_url
from funcpipe.runstate.documents import POLL_S, get_document
from funcpipe.runstate.functions import StartedFunction, list_functions, stop_functions
from funcpipe.runstate.generations import delete_run, list_generations, load_worker_specs, newest_record
from funcpipe.runstate.halt import halt_run, read_halt
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.limits import notice_steps
from funcpipe.runstate.resume import read_heartbeats

_log = logging.getLogger(__name__)

OpenPlatform = Callable[[str], Platform]

_SETTLE_S = 1.0  # then objects are deleted that functions wrote while they were ended


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a worker is doing: `outcome` is None while it is at work.

    Its last heartbeat is `heard_s` old, by the clock of its machine and the one of this machine.
    """

    worker: str
    attempt: int
    outcome: Outcome | None
    step: int
    saved_step: int
    memory_bytes: int
    memory_mb: int
    spent_usd: float
    heard_s: float
    busy: tuple[Busy, ...]
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """What a run is doing, and what it has cost and taken since it was first started.

    `halt` says why it ends early, if it does.
    """

    FORMAT: ClassVar[str] = "funcpipe.status/1"

    run: str
    generation: int
    steps: int
    run_usd: float
    run_s: float
    halt: str | None
    workers: tuple[WorkerStatus, ...]

    @property
    def step(self) -> int:
        """The steps that all workers have done."""
        return min((worker.step for worker in self.workers), default=0)


def status(storage: Storage, run: str, *, clock: Callable[[], float] = time.time) -> RunStatus:
    """What the run of that name in `storage` is doing; raises RunUnknown."""
    record = newest_record(storage, run)
    keys = Keys(run, record.generation)
    beats = read_heartbeats(storage, record)
    halt = read_halt(storage, keys)
    return RunStatus(
        run=run,
        generation=record.generation,
        steps=record.steps,
        run_usd=max([beat.run_usd for beat in beats if beat is not None], default=record.spent_usd),
        run_s=max([beat.run_s for beat in beats if beat is not None], default=record.elapsed_s),
        halt=None if halt is None else halt.reason,
        workers=tuple(_worker_status(storage, keys, beat, clock()) for beat in beats if beat is not None),
    )


def stop(storage: Storage, run: str, open_platform: OpenPlatform = open_by_url, *, wait_s: float = 60.0) -> RunStatus:
    """End the run after a step that all its workers can still end with, so that it can be resumed.

    Functions that still run after `wait_s` are ended at once. Raises RunUnknown.
    """
    record = newest_record(storage, run)
    keys = Keys(run, record.generation)
    beats = [beat for beat in read_heartbeats(storage, record) if beat is not None]
    heartbeat_s = max((spec.faults.heartbeat_s for spec in load_worker_specs(storage, keys)), default=0.0)
    step_s = min((beat.step_s for beat in beats if beat.step_s), default=0.0)
    last = max((beat.step for beat in beats), default=record.first_step) + notice_steps(heartbeat_s, step_s)
    _log.info("run %s: is to end after step %d", run, last)
    halt_run(storage, keys, Halt(reason="it was stopped", step=last))
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s and not _all_ended(storage, keys, record):
        time.sleep(POLL_S)
    _end_functions(record, list_functions(storage, keys), open_platform)
    return status(storage, run)


def clean(storage: Storage, run: str, open_platform: OpenPlatform = open_by_url) -> int:
    """End all functions of the run and delete all its objects; returns how many there were. Raises RunUnknown."""
    for number in list_generations(storage, run):
        keys = Keys(run, number)
        with contextlib.suppress(KeyMissing):
            record = get_document(storage, RunRecord, keys.record)
            _end_functions(record, list_functions(storage, keys), open_platform)
    count = len(storage.list(Keys(run).run_prefix))
    _log.info("run %s: deletes %d objects", run, count)
    if not count:
        raise RunUnknown(f"there is no run {run!r} in this storage")
    delete_run(storage, Keys(run))
    time.sleep(_SETTLE_S)
    delete_run(storage, Keys(run))
    return count


def _worker_status(storage: Storage, keys: Keys, beat: Heartbeat, now_s: float) -> WorkerStatus:
    report = _report(storage, keys, beat.worker, beat.attempt)
    ended = report is not None
    return WorkerStatus(
        worker=beat.worker,
        attempt=beat.attempt,
        outcome=report.outcome if report is not None else None,
        step=beat.step,
        saved_step=beat.saved_step,
        memory_bytes=beat.memory_bytes,
        memory_mb=beat.memory_mb,
        spent_usd=beat.spent_usd,
        heard_s=max(now_s - beat.sent_at_s, 0.0),
        busy=() if ended else beat.busy,
        error=report.error if report is not None else None,
    )


def _all_ended(storage: Storage, keys: Keys, record: RunRecord) -> bool:
    for beat in read_heartbeats(storage, record):
        report = None if beat is None else _report(storage, keys, beat.worker, beat.attempt)
        if report is None or report.outcome is Outcome.HANDED_OVER:
            return False
    return True


def _end_functions(record: RunRecord, functions: tuple[StartedFunction, ...], open_platform: OpenPlatform) -> None:
    """End `functions`; those of a platform that is gone have ended with it."""
    if functions:
        _log.info("run %s: ends %d functions", record.run, len(functions))
        stop_functions(open_platform(record.platform), [function.handle for function in functions])


def _report(storage: Storage, keys: Keys, worker: str, attempt: int) -> WorkerReport | None:
    try:
        return get_document(storage, WorkerReport, keys.worker_report(worker, attempt))
    except KeyMissing:
        return None
