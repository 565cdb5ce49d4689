"""Whole runs with a schedule, groups by name and an average: disturbed in every way they keep the bits of a quiet one,
and equal torch's own loop.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import OnProgress, Progress, RunResult, ignore_progress
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, Interval, Outcome, Plan, RunSettings, ScheduleKind, Sync, Wire, worker_name
from funcpipe.errors import InvalidValue, PlanError, WorkerFailed
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.reader import RunReader
from funcpipe.runstate.reports import load_reported
from funcpipe.runstate.signing import signed
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.averaging import EMA, SWA
from funcpipe.training.recipe import Recipe
from funcpipe.worker import hand_over
from tests.examples import in_long_run
from tests.support.plans import even_stages
from tests.support.waiting import wait_until
from tests.training.learning import (
    EPOCHS,
    GLOBAL_BATCH,
    MICRO_BATCH,
    SAMPLES,
    SCHEDULERS,
    all_steps,
    averaged_by_ema,
    by_name,
    data,
    difference,
    network,
    train_plainly,
)

RUN = "learns"
STEADY = FaultTolerance(heartbeat_s=0.2, lease_s=60.0, checkpoint_steps=2, keep=True)
SCHEDULER = "sequence"


@functools.cache
def graph() -> LayerGraph:
    return trace(network(), (torch.zeros(2, 6, dtype=torch.float64),))


def job(stages: int = 2, replicas: int = 2, *, sharded: bool = False, **recipe: Any) -> Job:
    plan = Plan(
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        replicas=replicas,
        schedule=ScheduleKind.ONE_F_ONE_B,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        platform="local",
        stages=even_stages([layer.name for layer in graph().layers], stages),
        shard_optimizer=sharded,
    )
    fields: dict[str, Any] = {
        "loss": nn.functional.cross_entropy,
        "optimizer": by_name,
        "scheduler": SCHEDULERS[SCHEDULER],
        "scheduler_interval": Interval.STEP,
        "average": EMA(decay=0.6),
        **recipe,
    }
    return Job(
        graph=graph(),
        plan=plan,
        recipe=Recipe(**fields),
        dataset=data,
        samples=SAMPLES,
        epochs=EPOCHS,
        seed=0,
        shuffle=True,
        message_deadline_s=300.0,
        prices=load_spec("local"),
    )


def run(
    made: Job,
    faults: FaultTolerance = STEADY,
    *,
    platform: ThreadPlatform | None = None,
    storage: MemoryStorage | None = None,
    before: ThreadPlatform | None = None,
    on_progress: OnProgress = ignore_progress,
) -> RunResult:
    """Train, or go on with the run in `storage`, whose functions ran on `before`."""
    storage = storage or MemoryStorage()
    platform = platform or ThreadPlatform(load_spec("local"), storage)
    where = session_on(Site(platform, storage, "memory://"), reopen=(before or platform).open)
    settings = RunSettings(resume=RUN) if before is not None else RunSettings(name=RUN)
    try:
        return launch(prepare(made, where, faults=faults, settings=settings), on_progress)
    finally:
        platform.stop_all()


def tensors_of(result: RunResult) -> dict[str, Tensor]:
    averaged = result.averaged_state_dict()
    return {**result.state_dict(), **{f"averaged {name}": tensor for name, tensor in averaged.items()}}


@functools.cache
def quiet() -> dict[str, Tensor]:
    return tensors_of(run(job()))


@functools.cache
def plainly() -> dict[str, Tensor]:
    reference = train_plainly(
        all_steps(),
        SCHEDULERS[SCHEDULER],
        average=averaged_by_ema(0.6),
    )
    assert reference.averaged is not None
    averaged = reference.averaged.module.state_dict()
    return {**reference.model.state_dict(), **{f"averaged {name}": tensor for name, tensor in averaged.items()}}


def test_a_quiet_run_equals_torch_s_own_loop() -> None:
    assert difference(quiet(), plainly()) < 1e-12


@pytest.mark.parametrize(("scheduler", "interval"), [("sequence", Interval.STEP), ("step", Interval.EPOCH)])
@pytest.mark.parametrize("sharded", [False, True])
def test_callbacks_hear_the_learning_rate_of_each_step(scheduler: str, interval: Interval, sharded: bool) -> None:
    heard: list[float | None] = []
    made = job(sharded=sharded, scheduler=SCHEDULERS[scheduler], scheduler_interval=interval)
    run(made, on_progress=lambda progress: heard.append(progress.learning_rate))
    by_step = interval is Interval.STEP
    assert tuple(heard) == train_plainly(all_steps(), SCHEDULERS[scheduler], by_step=by_step).rates
    assert len(set(heard)) > 1


@pytest.mark.parametrize("sharded", [False, True])
def test_the_curve_of_the_learning_rate_goes_on_in_a_resumed_run(sharded: bool) -> None:
    """All replicas report the same, so it does not matter whose rate a reader shows."""
    before, storage = halted(job(sharded=sharded))
    reported: dict[tuple[int, int, int], float | None] = {}
    heard: dict[int, float | None] = {}

    def read(progress: Progress | None = None) -> None:
        reader = RunReader.newest(signed(storage), RUN)
        for replica in (0, 1):
            reports = load_reported(reader.storage, reader.keys, worker_name(1, replica)).reports
            reported.update({(reader.record.generation, replica, n): own.learning_rate for n, own in reports.items()})
        if progress is not None:
            heard[progress.step - 1] = progress.learning_rate
        joined = {step: found.learning_rate for step, found in reader.steps.items()}
        assert joined == {step: rates[step] for step in joined}

    rates = train_plainly(all_steps(), SCHEDULERS[SCHEDULER]).rates
    read()
    run(job(sharded=sharded), storage=storage, before=before, on_progress=read)
    assert heard == {step: rates[step] for step in range(4, len(rates))}
    assert reported == {place: rates[place[2]] for place in reported}
    assert {place[:2] for place in reported} == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize(("moment", "sharded"), [(40, False), (90, True), (110, False)])
def test_a_killed_function_costs_no_bit(moment: int, sharded: bool) -> None:
    storage = MemoryStorage()
    platform = ThreadPlatform(
        load_spec("local"),
        storage,
        faults_of=lambda number: FunctionFaults(killed_at=moment if number == 1 else None),
    )
    result = run(job(sharded=sharded), platform=platform, storage=storage)
    assert result.bill.functions > 4
    assert difference(tensors_of(result), quiet()) == 0


RESUMED = [(4, 2, 0.0), (1, 4, 1e-12), *in_long_run([(2, 2, 0.0), (3, 1, 1e-12)])]


@pytest.mark.parametrize(("stages", "replicas", "tolerance"), RESUMED)
def test_a_run_that_is_resumed_by_another_plan_goes_on_with_schedule_and_average(
    stages: int, replicas: int, tolerance: float
) -> None:
    before, storage = halted()
    result = run(job(stages, replicas), storage=storage, before=before)
    assert difference(tensors_of(result), quiet()) <= tolerance


@pytest.mark.parametrize("sharded", [False, True])
def test_a_divided_optimiser_sees_the_rate_of_each_step(sharded: bool) -> None:
    before, storage = halted(job(sharded=True))
    result = run(job(sharded=sharded), storage=storage, before=before)
    assert difference(tensors_of(result), plainly()) < 1e-12


def test_hand_overs_cost_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "leaves_at_s", lambda *_: 0.0)  # after one step each
    result = run(job(), replace(STEADY, lifetime_s=600.0))
    assert sum(report.outcome is Outcome.HANDED_OVER for report in result.workers) == 4 * (len(result.losses) - 1)
    assert difference(tensors_of(result), quiet()) == 0


def test_an_average_that_would_never_begin_is_refused() -> None:
    storage = MemoryStorage()
    with pytest.raises(InvalidValue, match="start_step must be at most 9, the steps of the run, got 10"):
        run(job(average=SWA(start_step=10)), storage=storage)
    assert storage.list("") == ()


def test_a_run_is_resumed_with_the_schedule_and_the_average_that_it_began_with() -> None:
    before, storage = halted()
    objects = storage.list("")
    for change, message in (
        ({"scheduler": None}, "run learns has scheduler by step, not None; resume it with what it was started with"),
        ({"scheduler_interval": Interval.EPOCH}, "run learns has scheduler by step, not by epoch"),
        ({"average": None}, r"run learns has average EMA\(decay=0\.6, use_buffers=False\), not None"),
        ({"scheduler": SCHEDULERS["step"]}, "was started with a SequentialLR as its scheduler, not a StepLR"),
    ):
        with pytest.raises(PlanError, match=message):
            run(job(**change), storage=storage, before=before)
        assert storage.list("") == objects


class SixthNotSaved(FunctionFaults):
    """The function dies before it saves the first stage after six steps, once the run can be resumed after four."""

    SIXTH = "/checkpoints/s0/00000006"

    def __init__(self, storage: MemoryStorage, plan: Plan) -> None:
        super().__init__(killed_writing=(self.SIXTH, 1))
        self._storage, self._plan = signed(storage), plan

    def next(self, written: str = "") -> int:
        """As for any function."""
        if self.SIXTH in written:
            wait_until(lambda: self._saved_step() == 4)
        return super().next(written)

    def _saved_step(self) -> int:
        index = RunReader.newest(self._storage, RUN).index
        return index.common_step(len(self._plan.stages), self._plan.replicas)


def halted(made: Job | None = None) -> tuple[ThreadPlatform, MemoryStorage]:
    """A run that failed after six steps, and can be resumed after four."""
    made, storage = made or job(), MemoryStorage()
    platform = ThreadPlatform(load_spec("local"), storage, faults_of=lambda number: SixthNotSaved(storage, made.plan))
    with pytest.raises(WorkerFailed):
        run(made, replace(STEADY, max_attempts=1), platform=platform, storage=storage)
    return platform, storage
