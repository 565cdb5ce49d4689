import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import Resource, ScheduleKind, Sync
from funcpipe.errors import InvalidValue, PlanError
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.simulator.costs import Cost, costs_of
from funcpipe.scheduler.simulator.disturbances import Disturbances
from funcpipe.scheduler.simulator.simulate import play, simulate
from funcpipe.scheduler.tasks import ORDERS, SIDE_BY_SIDE, Kind, Order, Task, source_of
from tests.scheduler.shapes import chain_routes, drawn, shapes


@given(shapes(), st.integers(0, 2**32))
def test_nothing_starts_before_what_it_waits_for_and_lanes_do_one_thing_at_a_time(shape: StepShape, seed: int) -> None:
    graph = build_graph(shape)

    def seconds(task: Task, what: str) -> float:
        return drawn(seed, str(task), what)

    trace = simulate(graph, lambda task: Cost(seconds(task, "latency"), seconds(task, "body"), 1.0))
    found = {Task.parse(event.task): event for event in trace.events}
    assert found.keys() == set(graph.tasks)
    for task, needs in zip(graph.tasks, graph.needs, strict=True):
        assert all(found[graph.tasks[need]].end_s <= found[task].start_s for need in needs)
        if task.kind.is_get:
            assert found[source_of(task)].end_s <= found[task].start_s
    for positions in graph.lanes().values():
        tasks = [graph.tasks[i] for i in positions]
        strict = [found[task] for task in tasks if ORDERS[task.kind.resource] is Order.STRICT]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(strict))
        taken = [
            (found[t].end_s - seconds(t, "body") if t.kind in SIDE_BY_SIDE else found[t].start_s, found[t].end_s)
            for t in tasks
        ]
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(sorted(taken)))
        for task in tasks:
            if task.kind in SIDE_BY_SIDE:
                assert (
                    found[task].end_s - found[task].start_s >= seconds(task, "latency") + seconds(task, "body") - 1e-9
                )


@given(
    st.integers(1, 5).flatmap(
        lambda stages: st.tuples(*[st.lists(st.floats(0.001, 10), min_size=stages, max_size=stages) for _ in range(4)])
    ),
    st.integers(1, 8),
)
def test_a_chain_takes_the_time_of_the_closed_form(times: tuple[list[float], ...], micro_batches: int) -> None:
    """Sum over stages and lanes plus (mu - 1) times the slowest, forward and backward (FuncPipe, section 3.2)."""
    forward, backward, up, down = times
    stages = len(forward)

    def cost(task: Task) -> Cost:
        match task.kind:
            case Kind.FORWARD:
                return Cost(forward[task.stage])
            case Kind.BACKWARD:
                return Cost(backward[task.stage])
            case Kind.PUT_ACTIVATION | Kind.PUT_GRADIENT:
                return Cost(up[task.stage])
            case Kind.GET_ACTIVATION | Kind.GET_GRADIENT:
                return Cost(down[task.stage])
            case _:
                return Cost(0.0)

    sends, receives = range(stages - 1), range(1, stages)
    forward_lanes = [*forward, *(up[s] for s in sends), *(down[s] for s in receives)]
    backward_lanes = [*backward, *(up[s] for s in receives), *(down[s] for s in sends)]
    expected = sum(sum(lanes) + (micro_batches - 1) * max(lanes) for lanes in (forward_lanes, backward_lanes))
    shape = StepShape(
        stages=stages,
        replicas=1,
        micro_batches=micro_batches,
        routes=chain_routes(stages),
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
    )
    assert simulate(build_graph(shape), cost).duration_s == pytest.approx(expected, rel=1e-9)


def compute_only(task: Task) -> Cost:
    return Cost(1.0 if task.lane.resource is Resource.COMPUTE and task.kind is Kind.FORWARD else 0.0)


@pytest.mark.parametrize(("cores", "seconds"), [(1, 4.0), (2, 2.0), (4, 1.0), (9, 1.0)])
def test_functions_that_share_processors_slow_each_other_down(cores: int, seconds: float) -> None:
    shape = StepShape(
        stages=1,
        replicas=4,
        micro_batches=4,
        routes=chain_routes(1),
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
    )
    trace = simulate(build_graph(shape), compute_only, disturbances=Disturbances(shared_cores=cores))
    assert trace.duration_s == pytest.approx(seconds)


@pytest.mark.parametrize(("share", "seconds"), [(0.25, 1.0), (0.5, 1.0), (1.0, 2.0)])
def test_functions_with_a_share_of_a_processor_take_no_more_of_it(share: float, seconds: float) -> None:
    """Four compute for a second on two processors."""
    graph = Graph(tuple(Task(Kind.FORWARD, 0, replica, micro_batch=replica) for replica in range(4)), ((),) * 4)
    trace = simulate(graph, lambda task: Cost(1.0, processors=share), disturbances=Disturbances(shared_cores=2))
    assert trace.duration_s == pytest.approx(seconds)


def test_unequal_tasks_share_processors_equally() -> None:
    """One processor, work of 1 and 3 seconds begun together: the short one ends at 2, the long one at 4."""
    tasks = (Task(Kind.FORWARD, 0, 0, micro_batch=0), Task(Kind.FORWARD, 0, 1, micro_batch=1))
    trace = simulate(
        Graph(tasks, ((), ())), lambda task: Cost(1.0 + 2 * task.replica), disturbances=Disturbances(shared_cores=1)
    )
    assert [event.end_s for event in trace.events] == pytest.approx([2.0, 4.0])


def test_tasks_that_wait_for_each_other_are_an_error() -> None:
    tasks = (Task(Kind.FORWARD, 0, 0, micro_batch=0), Task(Kind.FORWARD, 0, 1, micro_batch=1))
    with pytest.raises(PlanError, match=r"cannot end; at the heads of its lanes wait forward\.s0\.r0\.m0"):
        simulate(Graph(tasks, ((1,), (0,))), lambda task: Cost(1.0))


def test_only_those_that_never_end_are_named() -> None:
    tasks = tuple(Task(Kind.FORWARD, 0, replica, micro_batch=0) for replica in range(3))
    with pytest.raises(PlanError, match=r"wait forward\.s0\.r1\.m0, forward\.s0\.r2\.m0$"):
        simulate(Graph(tasks, ((), (2,), (1,))), lambda task: Cost(1.0))


@pytest.mark.parametrize(
    "wrong", [{"seconds": -1.0}, {"link_bytes_s": 0.0}, {"processors": 0.0}, {"processors": 1.5}], ids=str
)
def test_impossible_costs_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidValue, match=next(iter(wrong))):
        Cost(**{"seconds": 1.0, **wrong})  # type: ignore[arg-type]


def test_a_step_lasts_until_the_end_of_its_last_task() -> None:
    graph = Graph((Task(Kind.FORWARD, 0, 0, 0), Task(Kind.FORWARD, 0, 1, 1)), ((), ()))
    assert play(graph, costs_of(graph, lambda task: Cost(1.0 + task.replica))).duration_s == 2.0
