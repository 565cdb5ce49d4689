"""The study of executed local steps: what it plans, times and keeps, from runs that are made up."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.studies import local_losses_report as report
from experiments.studies import local_steps_executed as executed
from experiments.studies.local_steps_executed import Learned, Measured, Point, Points
from funcpipe.analysis.predict import predict
from funcpipe.client.follow.callbacks import Callback, Callbacks
from funcpipe.client.follow.results import Progress
from funcpipe.core import (
    MB,
    Event,
    LayerProfile,
    ModelProfile,
    Resource,
    Source,
    TensorProfile,
    Trace,
    ValidationReport,
)
from funcpipe.platforms.catalog import load_spec

SPEC = executed.functions()
LAYERS = tuple(
    LayerProfile(name=f"l{i}", parameter_bytes=MB, activation_bytes=MB, forward_s=(0.1,), backward_s=(0.2,))
    for i in range(4)
)
MEASURED = Measured(
    micro_batch=1,
    spec=SPEC,
    profile=ModelProfile(
        model="CharacterTransformer",
        micro_batch=1,
        platform=SPEC.name,
        sizes=("400MB",),
        base_memory_bytes=200 * MB,
        layers=LAYERS,
        tensors=tuple(
            TensorProfile(name=f"t{i}", producer=i, consumers=(i + 1,), forward_bytes=9, backward_bytes=9)
            for i in range(3)
        ),
    ),
)


def test_functions_have_a_part_of_what_lambda_has() -> None:
    (size,), largest = SPEC.sizes, load_spec("aws-lambda").sizes[-1]
    assert size.memory_bytes == 400 * MB
    assert size.price_usd_s / size.memory_mb == pytest.approx(largest.price_usd_s / largest.memory_mb)
    assert size.vcpu / size.memory_mb == pytest.approx(largest.vcpu / largest.memory_mb)
    assert size.upload_bytes_s == pytest.approx(largest.upload_bytes_s * 400 / 1769)
    assert SPEC.max_functions == 8


def test_plans_are_of_two_stages_of_four_replicas() -> None:
    plans = {sync_every: MEASURED.plan(sync_every) for sync_every in executed.STEPS}
    for sync_every, plan in plans.items():
        assert [(stage.first, stage.stop) for stage in plan.stages] == [(0, 2), (2, 4)]
        assert (plan.replicas, plan.sync_every, plan.global_batch) == (4, sync_every, 4)
    estimates = [plan.estimate for plan in plans.values()]
    assert estimates[0] is not None
    assert estimates[1] is not None
    assert estimates[0].iteration_s > estimates[1].iteration_s


@pytest.mark.parametrize("sync_every", [1, 8])
def test_steps_are_timed_beside_what_was_predicted(monkeypatch: pytest.MonkeyPatch, sync_every: int) -> None:
    """Functions that take twice as long as predicted for everything, in each of the meetings' steps."""
    one = predict(MEASURED.plan(sync_every), MEASURED.profile, MEASURED.spec)
    meetings = range(sync_every - 1, 3 * sync_every, sync_every)
    slow = [
        replace(event, step=step, start_s=2 * (event.start_s + step), end_s=2 * (event.end_s + step))
        for step in meetings
        for event in one.events
    ]
    result = SimpleNamespace(trace=replace(one, events=tuple(slow), samples={}), losses=(4.0, 3.0, 2.0))
    monkeypatch.setattr(Measured, "train", lambda *_: result)
    row = MEASURED.time(sync_every, 3 * sync_every)
    assert row["observed_s"] == pytest.approx(2.0)
    assert row["observed_computing_s"] == pytest.approx(2 * row["predicted_computing_s"])
    assert row["predicted_computing_s"] == pytest.approx(4 * 0.3, rel=0.1)
    assert (row["plan"], row["losses"]) == ("2 x 4", [4.0, 2.0])


def test_a_run_s_losses_come_with_its_seconds_and_dollars(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(self: Measured, plan: Any, steps: int, *, validation: Any, callbacks: Iterable[Callback]) -> Any:
        reported, every = Callbacks(callbacks), validation.every_steps
        for step in range(1, steps + 1):
            progress = Progress(
                step=step, steps=steps, loss=1.0, samples_per_s=1.0, cost_usd=step / 100, elapsed_s=10.0 + step
            )
            reported(progress)
            if step % every == 0:
                values = {"val_loss": 4 - step / 32}
                reported(replace(progress, validation=ValidationReport(step=step, samples=64, values=values)))
        return SimpleNamespace(bill=SimpleNamespace(cost_usd=1.5))

    monkeypatch.setattr(Measured, "train", train)
    found = MEASURED.learn(8)
    assert [point.step for point in found.points] == [8, 16, 24, 32]
    assert found.points[1] == Point(step=16, run_s=26.0, run_usd=0.16, loss=3.5)
    assert (found.sync_every, found.global_batch, found.bill_usd) == (8, 4, 1.5)


def test_a_loss_belongs_to_the_step_before_it() -> None:
    with pytest.raises(AssertionError):
        Points().on_validation(1, {"val_loss": 1.0})


def test_a_step_lasts_from_meeting_to_meeting() -> None:
    ends = [1.0, 2.0, 5.0, 6.0, 7.0, 12.0]
    events = tuple(
        Event(task=f"F{step}", stage=0, replica=0, lane=Resource.COMPUTE, step=step, start_s=0.0, end_s=end_s)
        for step, end_s in enumerate(ends)
    )
    trace = Trace(run="r", source=Source.EXECUTED, events=events)
    assert executed.seconds_of_a_step(trace, 3) == (12 - 5) / 3
    assert executed.seconds_of_a_step(trace, 1) == 11 / 5


def test_the_finding_says_what_the_exchange_takes() -> None:
    """Computing takes 1 s of 2, so that a step of H = 8 takes 1.125 s."""
    rows = [
        {"sync_every": every, "predicted_s": step_s, "observed_s": 1.1 * step_s, "predicted_computing_s": 1.0}
        for every, step_s in ((1, 2.0), (8, 1.125))
    ]
    rows = [row | {"observed_computing_s": computing_s} for row, computing_s in zip(rows, (1.25, 0.9), strict=True)]
    assert executed.finding(rows) == (
        "the exchange takes 1.000 s, 50% of a step; predicted 1.78 times as fast, observed 1.78; "
        "observed beside predicted: +10.0%, +10.0%; computing alone: +25.0%, -10.0%"
    )


def learned(sync_every: int, step_s: float) -> Learned:
    points = (
        Point(step=step, run_s=step * step_s, run_usd=step * step_s / 1000, loss=4 - step / 10) for step in (10, 20)
    )
    return Learned(
        sync_every=sync_every,
        global_batch=8,
        predicted_s=step_s - 0.1,
        predicted_usd=0.0002,
        bill_usd=0.0625,
        points=tuple(points),
    )


def test_runs_are_kept_and_read_again(tmp_path: Path) -> None:
    runs = [learned(1, 2.0), learned(8, 1.0)]
    executed.write_learned(runs, tmp_path / "runs.json")
    assert list(executed.read_learned(tmp_path / "runs.json")) == runs


def test_losses_are_compared_after_equal_time_and_money() -> None:
    runs = [learned(1, 2.0), learned(8, 1.0)]
    assert [report.loss_at(runs[0], "run_s", seconds) for seconds in (1, 30, 99)] == [3.0, 2.5, 2.0]
    assert list(report.executed_table(runs))[2:] == [
        "| s of the run, 20 steps | 40.0 | 20.0 |",
        "| s predicted, of steps alone | 38.0 | 18.0 |",
        "| $ billed | 0.06250 | 0.06250 |",
        "| $ predicted, of steps alone | 0.00400 | 0.00400 |",
        "| loss after 20 steps | 2.000 | 2.000 |",
        "| loss after 20 s | 3.000 | 2.000 |",
        "| loss after $0.02000 | 3.000 | 2.000 |",
    ]


def test_curves_are_drawn_over_samples_seconds_and_dollars() -> None:
    from matplotlib.figure import Figure

    axes = list(Figure().subplots(3, squeeze=False)[:, 0])
    report.draw_executed([learned(1, 2.0), learned(8, 1.0)], axes)
    drawn = [[list(line.get_xdata()) for line in axis.lines] for axis in axes]
    assert drawn == [
        [[80, 160], [80, 160]],
        [[20.0, 40.0], [19.0, 38.0], [10.0, 20.0], [9.0, 18.0]],
        [[0.02, 0.04], [0.002, 0.004], [0.01, 0.02], [0.002, 0.004]],
    ]
