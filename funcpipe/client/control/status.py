"""The status of a run and of each of its workers."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from funcpipe.client.control.verdict import Verdict, final_failure, how_finished, judge
from funcpipe.core import MB, Busy, FinishedRun, Outcome, RunRecord, ValidationReport, worker_name
from funcpipe.core.json_form import IF_CHANGED
from funcpipe.core.start import StartTimes
from funcpipe.platforms.base import OpenPlatform, Storage
from funcpipe.platforms.catalog import open_platform as open_by_url
from funcpipe.runstate.finished import ended_step
from funcpipe.runstate.halt import read_halt
from funcpipe.runstate.liveness import HeartbeatReader, WorkerLiveness, WorkerState, find_liveness
from funcpipe.runstate.reader import RunReader
from funcpipe.runstate.signing import signed
from funcpipe.runstate.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """The status of a worker: `outcome` is None while it is at work.

    Its last heartbeat came `heard_s` ago, by the clock of its machine and the one of this machine; None is never. The
    start of its attempt took `start`, once that is known. It has used `device_bytes` of its accelerator, and the plan
    expected `planned_device_bytes`, if it has one.
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
    start: StartTimes | None = None
    device_bytes: int = field(default=0, metadata=IF_CHANGED)
    planned_device_bytes: int = field(default=0, metadata=IF_CHANGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run, with its cost and time since it was first started.

    `explanation` says why the `verdict` is what it is; a resumed run would continue after `saved_step`. `halt` says why
    the run ends early, if it does. Of a run that is `kept`, which has finished, only the model is left.
    `validation` is the newest. `loss_over` is what losses are means over, if not over samples.
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
    kept: bool = False
    validation: ValidationReport | None = None
    loss_over: str | None = None

    @property
    def step(self) -> int:
        """The steps that all workers have done."""
        return min((worker.step for worker in self.workers), default=0)


def _finished_status(record: RunRecord, finished: FinishedRun, validation: ValidationReport | None = None) -> RunStatus:
    """The status of a run that has finished, and of which the model is kept."""
    ended = ended_step(record, finished.losses)
    last = {report.worker: report for report in sorted(finished.workers, key=lambda report: report.attempt)}
    stages = {
        worker_name(stage, r): stage for stage in range(len(record.plan.stages)) for r in range(record.plan.replicas)
    }
    workers = tuple(
        WorkerStatus(
            worker=worker,
            state=WorkerState.FINISHED,
            attempt=last[worker].attempt,
            outcome=Outcome.FINISHED,
            step=ended,
            saved_step=ended,
            memory_bytes=last[worker].peak_memory_bytes,
            memory_mb=record.plan.stages[stage].memory_mb,
            spent_usd=sum(report.alive_s * report.usd_s for report in finished.workers if report.worker == worker),
            heard_s=None,
            busy=(),
            error=None,
            start=last[worker].start,
            device_bytes=last[worker].peak_device_bytes,
            planned_device_bytes=_planned_device_bytes(record, stage),
        )
        for worker, stage in stages.items()
        if worker in last
    )
    return RunStatus(
        run=record.run,
        generation=record.generation,
        steps=record.steps,
        run_usd=finished.bill.cost_usd,
        run_s=finished.elapsed_s,
        halt=None,
        verdict=Verdict.FINISHED,
        explanation=f"{how_finished(record, ended)}, and its model is kept ({finished.kept_bytes / MB:.1f} MB)",
        saved_step=ended,
        workers=workers,
        kept=True,
        validation=validation,
        loss_over=record.loss_over,
    )


def _worker_status(record: RunRecord, number: int, life: WorkerLiveness) -> WorkerStatus:
    """The status of the worker of that number, by stages and replicas, of a run that has not ended."""
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
        heard_s=None if life.seen_ago_s is None else max(life.seen_ago_s, 0.0),
        busy=beat.busy if beat is not None and life.at_work else (),
        error=report.error if report is not None else life.reason or None,
        start=report.start if report is not None else None if beat is None else beat.start,
        device_bytes=max(0 if beat is None else beat.device_bytes, 0 if report is None else report.peak_device_bytes),
        planned_device_bytes=_planned_device_bytes(record, stage),
    )


def _planned_device_bytes(record: RunRecord, stage: int) -> int:
    """Return what the plan of the run expects a stage to use of its accelerator; 0 where it has none."""
    stages = () if record.plan.estimate is None else record.plan.estimate.stages
    return sum(found.device.needs_bytes for found in stages[stage : stage + 1] if found.device is not None)


def status(
    storage: Storage,
    run: str,
    open_platform: OpenPlatform = open_by_url,
    *,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] | None = None,
) -> RunStatus:
    """Return the status of the run of that name in `storage`; raises RunUnknown.

    If a worker seems silent, or the platform cannot be asked, this waits with `pause` until a heartbeat must have come.
    """
    snapshot = Snapshot(signed(storage))

    def wait(seconds: float) -> None:
        (pause or time.sleep)(seconds)
        snapshot.renew()

    return read_status(RunReader.newest(snapshot, run), open_platform, clock=clock, pause=wait)


def read_status(
    reader: RunReader,
    open_platform: OpenPlatform,
    *,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], None] | None = None,
    heartbeats: HeartbeatReader | None = None,
) -> RunStatus:
    """Return the status of the run that `reader` reads, as `status` does; few of known `heartbeats` are read."""
    storage, record, keys = reader.storage, reader.record, reader.keys
    if reader.finished is not None:
        return _finished_status(record, reader.finished, reader.newest_validation)
    life = find_liveness(storage, record, open_platform, clock=clock, pause=pause or time.sleep, heartbeats=heartbeats)
    halt = read_halt(storage, keys)
    saved_step = reader.index.resume_step(len(record.plan.stages), record.plan.replicas)
    validation = reader.newest_validation
    verdict, explanation = judge(
        *(record, life, halt, final_failure(storage, keys)),
        saved_step=saved_step,
        stopped_step=None if validation is None or not validation.ends(record.first_step) else validation.step,
    )
    beats = [worker.beat for worker in life.workers if worker.beat is not None]
    return RunStatus(
        run=record.run,
        generation=record.generation,
        steps=record.steps,
        run_usd=max([beat.run_usd + beat.run_requests_usd for beat in beats], default=record.spent_usd),
        run_s=max([beat.run_s for beat in beats], default=record.elapsed_s),
        halt=None if halt is None else halt.reason,
        verdict=verdict,
        explanation=explanation,
        saved_step=saved_step,
        workers=tuple(_worker_status(record, number, worker) for number, worker in enumerate(life.workers)),
        validation=validation,
        loss_over=record.loss_over,
    )
