import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import FaultTolerance, RunAccount, RunLimits
from funcpipe.errors import InvalidValue
from funcpipe.runstate.halt import BudgetGuard
from funcpipe.worker.checkpoint_manager import COST_SHARE, LATE_STEPS, CheckpointInterval, daly_s


def lost_share(interval_s: float, checkpoint_s: float, failure_interval_s: float) -> float:
    """The share of time that is lost when failures come at random (Daly's exact model, restarts free)."""
    m = failure_interval_s
    return m * math.expm1((interval_s + checkpoint_s) / m) / interval_s - 1


@pytest.mark.parametrize("checkpoint_s", [0.1, 2.0, 30.0])
@pytest.mark.parametrize("failure_interval_s", [600.0, 86_400.0])
def test_no_interval_loses_less(checkpoint_s: float, failure_interval_s: float) -> None:
    best_s = daly_s(checkpoint_s=checkpoint_s, failure_interval_s=failure_interval_s)
    found = lost_share(best_s, checkpoint_s, failure_interval_s)
    others = [lost_share(best_s * f, checkpoint_s, failure_interval_s) for f in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)]
    assert found <= min(others)


def test_checkpoints_longer_than_lives_are_as_rare_as_failures() -> None:
    assert daly_s(checkpoint_s=30.0, failure_interval_s=10.0) == 10.0
    with pytest.raises(InvalidValue):
        daly_s(checkpoint_s=1.0, failure_interval_s=0.0)


@given(st.floats(0.01, 100), st.floats(0.001, 100), st.integers(0, 10**9), st.integers(1, 8), st.floats(10, 1e6))
def test_stages_save_at_steps_that_coincide(
    step_s: float, checkpoint_s: float, received: int, replicas: int, failure_interval_s: float
) -> None:
    interval = CheckpointInterval(FaultTolerance(failure_interval_s=failure_interval_s), replicas=replicas)
    assert interval.steps() == 1
    interval.record_step(step_s, received)
    interval.checkpoint_s = checkpoint_s
    every = interval.steps()
    assert every & (every - 1) == 0
    assert every * received <= 2 * FaultTolerance().retained_bytes or every == 1
    best_s = daly_s(checkpoint_s=checkpoint_s, failure_interval_s=failure_interval_s / replicas)
    assert every == 1 or every * step_s <= 2 * best_s


@pytest.mark.parametrize(
    ("objects", "checkpoint_s", "expected"),
    [
        (4, 1e-6, 16),  # 100 objects are 25 steps: an interval, and those until readers have covered it
        (5, 1e-6, 16),
        (6, 1e-6, 8),
        (16, 1e-6, 2),
        (25, 1e-6, 1),
        (1000, 1e-6, 1),
        (16, 0.04, 2),  # a fiftieth of 2 steps
        (16, 0.05, 4),
        (16, 3.0, 256),
        (1000, 3.0, 256),
    ],
)
def test_few_objects_are_kept_as_far_as_checkpoints_stay_cheap(
    objects: int, checkpoint_s: float, expected: int
) -> None:
    interval = CheckpointInterval(FaultTolerance(failure_interval_s=1e12), replicas=1)
    interval.checkpoint_s = 1000.0
    interval.record_step(1.0, 1, objects)
    few = interval.steps()
    assert few == 1 or (few + LATE_STEPS) * objects <= FaultTolerance().retained_objects < (2 * few + 4) * objects
    for _ in range(2):
        assert interval.steps() == few
        interval.begin_checkpoint()
        interval.record_cost(checkpoint_s)
    assert interval.steps() == expected
    assert expected == few or checkpoint_s <= COST_SHARE * expected * 1.0 < 2 * checkpoint_s


def test_failures_and_bytes_shorten_the_interval_further() -> None:
    for faults in (FaultTolerance(failure_interval_s=10.0), FaultTolerance(retained_bytes=1000)):
        interval = CheckpointInterval(faults, replicas=1)
        interval.record_step(1.0, 250, 1)
        interval.checkpoint_s = 1.0
        assert interval.steps() == 4


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_one_slow_checkpoint_changes_nothing(slow: int) -> None:
    interval = CheckpointInterval(FaultTolerance(), replicas=1)
    interval.checkpoint_s = 1.0
    interval.record_step(1.0, 1, 6)
    for number in range(3):
        interval.begin_checkpoint()
        interval.record_cost(60.0 if number == slow else 0.01)
        assert interval.steps() == 8


def test_a_function_that_must_leave_in_time_reckons_with_its_last_write() -> None:
    interval = CheckpointInterval(FaultTolerance(), replicas=1)
    for written_s in (0.01, 60.0):
        interval.begin_checkpoint()
        interval.checkpoint_s = written_s
    assert interval.checkpoint_s == 60.0


def test_all_that_a_checkpoint_costs_makes_the_interval_longer() -> None:
    """The write alone would allow a checkpoint every 8 steps; the worker that does not write pays for the rest too."""
    writer, other = (CheckpointInterval(FaultTolerance(), replicas=2) for _ in range(2))
    for interval in (writer, other):
        interval.checkpoint_s = 1.0
        interval.record_step(0.1, 1, 6)
        interval.record_cost(100.0)  # of no checkpoint
    for _ in range(2):
        for interval in (writer, other):
            interval.begin_checkpoint()
        writer.checkpoint_s = 0.01
        writer.record_cost(0.01)
    assert (writer.steps(), other.steps()) == (8, 8)
    for _ in range(3):
        for interval in (writer, other):
            interval.begin_checkpoint()
            for _ in range(4):  # marks, looks, deletions
                interval.record_cost(0.005)
    assert (writer.steps(), other.steps()) == (16, 16)
    assert writer.checkpoint_s == 0.01


def test_the_interval_may_be_chosen() -> None:
    interval = CheckpointInterval(FaultTolerance(checkpoint_steps=7), replicas=1)
    interval.record_step(1.0, 1)
    assert interval.steps() == 7


def test_a_limit_is_seen_early_enough_for_all_to_hear_of_it() -> None:
    limits = BudgetGuard(RunLimits(max_usd=1.0), RunAccount(spent_usd=0.5, run_usd_s=0.01), heartbeat_s=5.0)
    assert limits.exceeded(49.0) is None
    assert limits.exceeded(51.0) == "it would cost more than $1"
    assert limits.halt_before_exceeding(step=10, steps=100, age_s=20.0, step_s=1.0, end_s=5.0) is None
    order = limits.halt_before_exceeding(step=10, steps=100, age_s=35.0, step_s=1.0, end_s=5.0)
    assert order is not None
    assert order.step == 10 + 1 + 10  # two heartbeats, and a step
    assert (
        limits.halt_before_exceeding(step=95, steps=100, age_s=35.0, step_s=1.0, end_s=5.0) is None
    )  # it ends by itself
    late = BudgetGuard(RunLimits(deadline_s=100.0), RunAccount(elapsed_s=60.0), heartbeat_s=10.0)
    assert late.exceeded(39.0) is None
    assert late.exceeded(41.0) == "it would take longer than 100 s"
