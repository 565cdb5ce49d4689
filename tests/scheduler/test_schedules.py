import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import ScheduleKind
from funcpipe.errors import InvalidValue, PlanError
from funcpipe.scheduler.schedules import Action, actions, in_flight
from tests.scheduler.grid import from_grid, to_grid

GRIDS = {
    ScheduleKind.GPIPE: """
        stage 0   F0 F1 F2 F3             B3 B2 B1 B0
        stage 1      F0 F1 F2 F3       B3 B2 B1 B0
        stage 2         F0 F1 F2 F3 B3 B2 B1 B0""",
    ScheduleKind.ONE_F_ONE_B: """
        stage 0   F0 F1 F2       B0 F3 B1    B2    B3
        stage 1      F0 F1    B0 F2 B1 F3 B2    B3
        stage 2         F0 B0 F1 B1 F2 B2 F3 B3""",
    ScheduleKind.EAGER_ONE_F_ONE_B: """
        stage 0   F0 F1 F2 F3    B0    B1    B2    B3
        stage 1      F0 F1 F2 B0 F3 B1    B2    B3
        stage 2         F0 B0 F1 B1 F2 B2 F3 B3""",
}


def orders(schedule: ScheduleKind, stages: int, micro_batches: int) -> list[tuple[Action, ...]]:
    return [actions(schedule, range(micro_batches), stage=stage, stages=stages) for stage in range(stages)]


@pytest.mark.parametrize("schedule", ScheduleKind)
def test_the_schedules_drawn(schedule: ScheduleKind) -> None:
    drawn = textwrap.dedent(GRIDS[schedule]).strip()
    assert to_grid(orders(schedule, 3, 4)) == drawn
    assert list(from_grid(drawn)) == orders(schedule, 3, 4)


@given(st.sampled_from(ScheduleKind), st.integers(1, 7), st.integers(0, 12))
def test_every_schedule_ends_and_reads_back(schedule: ScheduleKind, stages: int, micro_batches: int) -> None:
    assert list(from_grid(to_grid(orders(schedule, stages, micro_batches)))) == orders(schedule, stages, micro_batches)


@given(st.sampled_from(ScheduleKind), st.integers(1, 7), st.integers(1, 12))
def test_in_flight_is_the_most_that_have_begun_and_not_gone_back(
    schedule: ScheduleKind, stages: int, micro_batches: int
) -> None:
    for stage, order in enumerate(orders(schedule, stages, micro_batches)):
        held: set[int] = set()
        most = 0
        for action in order:
            if action.backward:
                held.remove(action.micro_batch)
            else:
                held.add(action.micro_batch)
            most = max(most, len(held))
        assert not held
        assert most == in_flight(schedule, stage=stage, stages=stages, micro_batches=micro_batches)


def test_stages_in_orders_that_do_not_fit_wait_for_ever() -> None:
    with pytest.raises(PlanError, match=r"B1 of stage 0, F1 of stage 1"):
        to_grid(from_grid("stage 0 F0 B1 F1 B0\nstage 1 F0 F1 B1 B0"))


@pytest.mark.parametrize("text", ["stage 1 F0 B0", "F0 B0", "stage 0 F0 X0", "stage 0 F0 B"])
def test_what_is_no_grid_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        from_grid(text)
