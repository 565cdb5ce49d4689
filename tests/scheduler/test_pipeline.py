import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import ScheduleKind, Sync
from funcpipe.errors import InvalidValue, PlanError
from funcpipe.scheduler.graph import StepShape, build_graph
from funcpipe.scheduler.pipeline import SPARE, Action, Loading, actions, in_flight, loaded_ahead
from funcpipe.scheduler.simulator.costs import Cost, costs_of
from funcpipe.scheduler.simulator.simulate import play
from funcpipe.scheduler.tasks import Kind, Task
from tests.scheduler.grid import from_grid, to_grid
from tests.scheduler.shapes import chain_routes

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


def shape(micro_batches: int, loading: Loading, schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B) -> StepShape:
    return StepShape(
        stages=1,
        replicas=1,
        micro_batches=micro_batches,
        routes=chain_routes(1),
        schedule=schedule,
        sync=Sync.THREE_PHASE,
        loading=loading,
    )


def needs_of(step: StepShape) -> dict[str, list[str]]:
    graph = build_graph(step)
    return {
        str(task): [str(graph.tasks[need]) for need in needs]
        for task, needs in zip(graph.tasks, graph.needs, strict=True)
    }


def test_a_step_by_hand() -> None:
    needs = needs_of(shape(4, Loading(stages=frozenset({0}), following=4)))
    assert {task: what for task, what in needs.items() if task.startswith("load")} == {
        "load.s0.r0.m2": [],
        "load.s0.r0.m3": [],
        "load.s0.r0.m0.k1": ["forward.s0.r0.m0"],
        "load.s0.r0.m1.k1": ["forward.s0.r0.m1"],
    }
    assert needs["forward.s0.r0.m1"] == []
    assert needs["forward.s0.r0.m2"] == ["load.s0.r0.m2"]


def test_the_first_step_loads_all_of_its_own_and_the_last_step_nothing_more() -> None:
    first = needs_of(shape(3, Loading(stages=frozenset({0}), following=0, is_loaded=False)))
    assert [task for task in first if task.startswith("load")] == ["load.s0.r0.m0", "load.s0.r0.m1", "load.s0.r0.m2"]
    assert all(f"load.s0.r0.m{m}" in first[f"forward.s0.r0.m{m}"] for m in range(3))


@given(
    schedule=st.sampled_from(ScheduleKind),
    steps=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    stages=st.integers(1, 3),
)
def test_steps_one_after_the_other_load_everything_once_in_order_and_not_too_much(
    schedule: ScheduleKind, steps: list[int], stages: int
) -> None:
    loaded: list[tuple[int, int]] = []
    held: set[tuple[int, int]] = set()
    for number, count in enumerate(steps):
        following = steps[number + 1] if number + 1 < len(steps) else 0
        is_loaded = any(step == number for step, _ in held)
        loading = Loading(stages=frozenset({0}), following=following, is_loaded=is_loaded)
        step = StepShape(
            stages=stages,
            replicas=1,
            micro_batches=count,
            routes=chain_routes(stages),
            schedule=schedule,
            sync=Sync.THREE_PHASE,
            loading=loading,
        )
        part = build_graph(step).of_worker(0, 0)
        most = loaded_ahead(schedule, stage=0, stages=stages, micro_batches=max(count, following)) + SPARE
        for task in part.tasks:
            if task.kind is Kind.LOAD:
                assert task.micro_batch is not None
                loaded.append((number + (task.part or 0), task.micro_batch))
                held.add(loaded[-1])
                assert len(held) <= most + 1
            elif task.kind is Kind.FORWARD:
                assert task.micro_batch is not None
                held.remove((number, task.micro_batch))
    assert loaded == [(number, m) for number, count in enumerate(steps) for m in range(count)]


def simulated_s(step: StepShape, *, load_s: float) -> float:
    graph = build_graph(step)

    def cost(task: Task) -> Cost:
        return Cost({Kind.LOAD: load_s, Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}.get(task.kind, 0.0))

    return play(graph, costs_of(graph, cost)).trace(run="test").duration_s


def test_loading_hides_behind_computation_and_bounds_the_step_where_it_cannot() -> None:
    for schedule in ScheduleKind:
        step = shape(8, Loading(stages=frozenset({0}), following=8), schedule)
        assert simulated_s(step, load_s=2.5) == 8 * (1 + 2)
        assert simulated_s(step, load_s=4.0) == 8 * 4.0
