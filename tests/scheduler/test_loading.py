"""Loads run ahead of the forwards that read them, within bounds, and over the ends of steps."""

from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import ScheduleKind, Sync
from funcpipe.scheduler.graph import StepShape, build_graph
from funcpipe.scheduler.loading import SPARE, Loading, loaded_ahead
from funcpipe.scheduler.simulator.costs import Cost, costs_of
from funcpipe.scheduler.simulator.simulate import play
from funcpipe.scheduler.tasks import Kind, Task
from tests.scheduler.shapes import chain_routes


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
