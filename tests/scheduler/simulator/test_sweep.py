"""All workers played at a time, against the same graph played event by event."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import Resource, ScheduleKind, Sync
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.simulator import simulate
from funcpipe.scheduler.simulator.compiled_graph import graph_arrays, graph_columns
from funcpipe.scheduler.simulator.costs import Cost, Costs, Timeline, costs_of
from funcpipe.scheduler.simulator.disturbances import Disturbances, Failure, cold_starts, disturbed
from funcpipe.scheduler.simulator.folded_graph import FoldedGraph
from funcpipe.scheduler.simulator.simulate import play, play_folded
from funcpipe.scheduler.simulator.sweep import Swept, sweep
from funcpipe.scheduler.tasks import Kind, Task
from tests.examples import at_most
from tests.scheduler.shapes import chain_routes, drawn, shapes

COMPUTATIONS = frozenset({Kind.FORWARD, Kind.BACKWARD})

NOISES = st.builds(
    Disturbances,
    compute_jitter=st.sampled_from([0.0, 0.1]),
    transfer_jitter=st.sampled_from([0.0, 0.5]),
    cold_start_s=st.sampled_from([0.0, 1.0]),
    cold_start_jitter=st.sampled_from([0.0, 0.3]),
    stragglers=st.dictionaries(st.just((0, 0)), st.sampled_from([0.5, 4.0])),
    seed=st.integers(0, 99),
)


def costs_by(seed: int, latency_s: float, *, few: bool) -> Callable[[Task], Cost]:
    """Costs of each task by itself, or of few values, so that many tasks end at the same moment."""

    def cost(task: Task) -> Cost:
        first, second = (drawn(seed, str(task), number) for number in range(2))
        if few:
            first, second = int(3 * first) / 2, (1 + int(2 * second)) / 10
        if task.kind.resource not in (Resource.UPLOAD, Resource.DOWNLOAD):
            return Cost(first)
        return Cost(latency_s * (1 + (first if first < 0.5 else 0.0)), round(100 * second), 70.0)

    return cost


def swept(graph: Graph, costs: Costs, found: Disturbances) -> Swept | None:
    columns = graph_columns(graph)
    arrays = graph_arrays(columns)
    starts_s = cold_starts(len(arrays.workers), found)
    return sweep(arrays, disturbed(costs, columns, found), starts_s, found.failures)


def assert_equal(found: Swept, expected: Timeline) -> None:
    assert found.starts_s.tolist() == expected.starts_s
    assert found.ends_s.tolist() == expected.ends_s
    assert found.attempts == list(expected.attempts)
    assert found.lost == expected.lost


@at_most(40)
@given(shapes(), st.integers(0, 2**32), st.sampled_from([0.01, 0.1, 1.0]), st.booleans(), NOISES)
def test_played_at_a_time_all_starts_and_ends_are_those_of_one_event_after_the_other(
    shape: StepShape, seed: int, latency_s: float, few: bool, noise: Disturbances
) -> None:
    graph = build_graph(shape)
    costs = costs_of(graph, costs_by(seed, latency_s, few=few))
    found = swept(graph, costs, noise)
    if found is not None:
        assert_equal(found, play(graph, costs, disturbances=noise))


@at_most(40)
@given(
    shapes(),
    st.integers(0, 2**32),
    st.sampled_from([0.01, 0.1, 1.0]),
    st.booleans(),
    NOISES,
    st.lists(st.tuples(st.floats(0, 20), st.sampled_from([0.0, 0.3, 1.0])), min_size=1, max_size=4),
)
def test_after_deaths_too(
    shape: StepShape, seed: int, latency_s: float, few: bool, noise: Disturbances, deaths: list[tuple[float, float]]
) -> None:
    graph = build_graph(shape)
    costs = costs_of(graph, costs_by(seed, latency_s, few=few))
    failures = tuple(
        Failure(worker=(i % shape.stages, 0), at_s=at_s, restart_s=restart_s)
        for i, (at_s, restart_s) in enumerate(deaths)
    )
    died = replace(noise, failures=failures)
    found = swept(graph, costs, died)
    if found is not None:
        assert_equal(found, play(graph, costs, disturbances=died))


def step(sync: Sync) -> StepShape:
    return StepShape(
        stages=3,
        replicas=4,
        micro_batches=12,
        routes=chain_routes(3),
        schedule=ScheduleKind.ONE_F_ONE_B,
        sync=sync,
        norms=True,
    )


NOISE = Disturbances(compute_jitter=0.05, transfer_jitter=0.05, stragglers={(1, 2): 1.5}, seed=3)
DEATHS = tuple(Failure(worker=worker, at_s=at_s, restart_s=1.0) for worker, at_s in (((0, 1), 1.5), ((2, 3), 4.0)))


def one_of_a_stage(task: Task) -> Cost:
    """Costs that do not depend on replica and micro-batch; sums are free, as in the cost model."""
    if task.kind.resource in (Resource.UPLOAD, Resource.DOWNLOAD):
        return Cost(0.04, 10 + task.stage, 100.0)
    return Cost(0.3 if task.kind in COMPUTATIONS else 0.0)


@pytest.mark.parametrize("failures", [(), DEATHS])
@pytest.mark.parametrize("sync", Sync)
def test_noisy_steps_are_played_at_a_time(
    sync: Sync, failures: tuple[Failure, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, died = step(sync), replace(NOISE, failures=failures)
    whole, folded = build_graph(shape), FoldedGraph.of(shape)
    expected = play(whole, costs_of(whole, one_of_a_stage), disturbances=died)
    assert bool(expected.lost) == bool(failures)
    monkeypatch.setattr(simulate, "SWEPT", 0)
    monkeypatch.setattr(simulate, "_play", None)
    found = play_folded(folded, costs_of(folded.graph, one_of_a_stage), disturbances=died)
    assert found.trace(run="r") == expected.trace(run="r")


def test_where_the_order_cannot_be_told_events_are_played_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = step(Sync.STREAMED)
    whole, folded = build_graph(shape), FoldedGraph.of(shape)
    assert swept(whole, costs_of(whole, lambda task: Cost(0.0)), NOISE) is None
    monkeypatch.setattr(simulate, "SWEPT", 0)
    found = play_folded(folded, costs_of(folded.graph, lambda task: Cost(0.0)), disturbances=NOISE)
    assert found.ends_s == [0.0] * len(whole.tasks)


def test_two_workers_read_what_the_other_puts() -> None:
    """The example of the module: puts of 2 s and 3 s end at 2 s and 3 s, and gets of 2 s start then."""
    tasks = [Task(kind, stage, 0) for stage in range(2) for kind in (Kind.PUT_NORM, Kind.GET_NORM)]
    graph = Graph(tuple(tasks), ((), (2,), (), (0,)))
    table = dict(zip(tasks, (2.0, 2.0, 3.0, 2.0), strict=True))
    found = swept(graph, costs_of(graph, lambda task: Cost(table[task])), Disturbances())
    assert found is not None
    assert (found.starts_s.tolist(), found.ends_s.tolist()) == ([0, 3, 0, 2], [2, 5, 3, 4])


def compute(number: int, seconds: float) -> tuple[Task, Cost]:
    return Task(Kind.FORWARD, 0, 0, micro_batch=number), Cost(seconds)


def request(kind: Kind, number: int, seconds: float = 1.0, size: int = 0) -> tuple[Task, Cost]:
    return Task(kind, 0, 0, part=number), Cost(seconds, size, 100.0)


PUT, GET, PUT_BESIDE, GET_BESIDE = Kind.PUT_ACTIVATION, Kind.GET_ACTIVATION, Kind.PUT_SPLIT, Kind.GET_SPLIT

DOUBTFUL = {
    "a put ends, and so releases one before another one, all within a window": (
        (request(PUT_BESIDE, 0, 1.0, 10), (Task(Kind.MERGE, 0, 0), Cost(0.0)), request(Kind.PUT_MERGED, 1, 1.0, 10)),
        (compute(0, 1.5), request(PUT_BESIDE, 2, 1.0, 10)),
        ((), (0,), (1,), (), (3,)),
    ),
    "a put ends, and so releases a get before another one, all within a window": (
        (request(PUT_BESIDE, 0, 1.0, 10), request(GET, 0)),
        (compute(0, 1.5), request(GET, 1)),
        ((), (0,), (), (2,)),
    ),
    "there is room for a put when it may start": (
        tuple(request(PUT_BESIDE, i, 1.0, 50) for i in range(4)),
        (compute(0, 1.5), request(PUT_BESIDE, 4, 1.0, 50)),
        ((), (), (), (), (), (4,)),
    ),
    "there is room for a get when it may start": (
        tuple(request(GET, i) for i in range(4)),
        (compute(0, 1.0), request(GET, 4)),
        ((), (), (), (), (), (4,)),
    ),
    "there is room for later puts, which are released first, at the same moment": (
        (compute(0, 1.0), compute(1, 0.0)),
        tuple(request(PUT_BESIDE, i, 1.0, 10) for i in range(5)),
        ((), (0,), (1,), (0,), (0,), (0,), (0,)),
    ),
    "a put and a computation end at the same moment, and each releases a put": (
        (request(PUT_BESIDE, 0, 1.0, 200), request(PUT_BESIDE, 1, 1.0, 10)),
        (compute(0, 3.0), request(PUT_BESIDE, 2, 1.0, 10)),
        ((), (0,), (), (2,)),
    ),
    "a computation takes no time at the start, when a get may start too": (
        (compute(0, 0.0), request(GET, 0), request(GET, 1)),
        (),
        ((), (0,), ()),
    ),
    "a put takes no time": ((compute(0, 1.0), request(PUT, 0, 0.0)), (), ((), (0,))),
    "the later of two gets is released first, at the same moment": (
        (compute(0, 1.0), compute(1, 0.0)),
        (request(GET, 0), request(GET, 1)),
        ((), (0,), (1,), (0,)),
    ),
    "the latency of a get is over when another one may start": (
        (request(GET_BESIDE, 0, 1.0, 10),),
        (compute(0, 1.0), request(GET, 1)),
        ((), (), (1,)),
    ),
    "a get may start when the lane is free": (
        (request(GET, 0), request(GET, 1, 2.0)),
        (compute(0, 1.0), request(GET, 2)),
        ((), (), (), (2,)),
    ),
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_an_order_that_is_not_certain_is_noticed(case: str) -> None:
    *tasks, needs = DOUBTFUL[case]
    costs = dict((*tasks[0], *tasks[1]))
    graph = Graph(tuple(costs), needs)
    assert swept(graph, costs_of(graph, costs.__getitem__), Disturbances()) is None
    assert max(play(graph, costs_of(graph, costs.__getitem__)).ends_s) > 0


def test_a_death_at_the_moment_of_a_request_is_noticed() -> None:
    costs = dict((compute(0, 1.0), request(PUT, 0)))
    graph = Graph(tuple(costs), ((), (0,)))
    table = costs_of(graph, costs.__getitem__)
    found = [
        swept(graph, table, Disturbances(failures=(Failure(worker=(0, 0), at_s=at_s, restart_s=1.0),)))
        for at_s in (1.0, 1.5)
    ]
    assert found[0] is None
    assert found[1] is not None
    assert found[1].ends_s.tolist() == [3.5, 4.5]
