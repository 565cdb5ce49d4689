"""The simulator under disturbances: against sums made by hand, and against the same rules computed the slow way."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import Resource
from funcpipe.errors import InvalidValue
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.simulator.costs import Cost, Costs, costs_of
from funcpipe.scheduler.simulator.disturbances import Disturbances, Failure, log_normal
from funcpipe.scheduler.simulator.simulate import play, simulate
from funcpipe.scheduler.tasks import Kind, Task
from tests.examples import at_most
from tests.scheduler.shapes import drawn, shapes
from tests.scheduler.simulator.plain_fluid import plain_ends

LINKS = (10.0, 25.0, 70.0)


def forward(replica: int, micro_batch: int = 0) -> Task:
    return Task(Kind.FORWARD, 0, replica, micro_batch=micro_batch)


def put(replica: int, part: int = 0) -> Task:
    return Task(Kind.PUT_ACTIVATION, 0, replica, micro_batch=0, part=part)


def ends(graph: Graph, costs: list[Cost], disturbances: Disturbances) -> list[float]:
    table = dict(zip(graph.tasks, costs, strict=True))
    return list(play(graph, costs_of(graph, table.__getitem__), disturbances=disturbances).ends_s)


def mixed(task: Task, seed: int) -> Cost:
    first, second, third = (drawn(seed, str(task), number) for number in range(3))
    if task.kind.resource is Resource.COMPUTE:
        return Cost(3 * first if second < 0.5 else 0.0, processors=(0.2, 0.5, 1.0)[task.stage % 3])
    if task.kind.resource not in (Resource.UPLOAD, Resource.DOWNLOAD):
        return Cost(0.1 * first)
    return Cost(0.1 * first, int(100 * second), LINKS[int(len(LINKS) * third)])


disturbances = st.builds(
    Disturbances,
    contention=st.sampled_from([1.0, 1.5, 3.0]),
    shared_bytes_s=st.sampled_from([None, 5.0, 60.0]),
    shared_cores=st.sampled_from([None, 1, 3]),
)


@at_most(60)
@given(shapes(), st.integers(0, 2**32), disturbances)
def test_shared_links_processors_and_contention_as_computed_the_slow_way(
    shape: StepShape, seed: int, found: Disturbances
) -> None:
    graph = build_graph(replace(shape, micro_batches=min(shape.micro_batches, 4)))
    costs = costs_of(graph, lambda task: mixed(task, seed))
    assert play(graph, costs, disturbances=found).ends_s == pytest.approx(plain_ends(graph, costs, found), rel=1e-6)


polls = st.sampled_from([0.0, 0.7])


def polled(costs: Costs, graph: Graph, poll_s: float) -> Costs:
    return replace(costs, poll_s=np.array([poll_s * task.kind.is_get for task in graph.tasks]))


@given(shapes(), st.integers(0, 2**32), polls)
def test_both_ways_to_play_agree_where_nothing_is_shared(shape: StepShape, seed: int, poll_s: float) -> None:
    graph = build_graph(shape)
    costs = polled(costs_of(graph, lambda task: mixed(task, seed)), graph, poll_s)
    alone = play(graph, costs)
    late = Disturbances(failures=(Failure(worker=(0, 0), at_s=1e9, restart_s=1.0),))
    assert play(graph, costs, disturbances=late).ends_s == pytest.approx(alone.ends_s)
    assert play(graph, costs, disturbances=late).starts_s == pytest.approx(alone.starts_s)


def test_a_computation_is_slower_while_bytes_of_its_function_move() -> None:
    """Latency 0.5 s, then 1 s of bytes: 0.5 s at full speed, 1 s at 2/3, and the rest of 2 s at full speed."""
    graph = Graph((forward(0), put(0)), ((), ()))
    assert ends(graph, [Cost(2.0), Cost(0.5, 10, 10.0)], Disturbances(contention=1.5)) == pytest.approx(
        [2 + 1 / 3, 1.5]
    )


def test_without_contention_transfers_do_not_touch_computations() -> None:
    """Not even the last bit of their ends: in floating point, 0.2 + (0.9 - 0.2) is less than 0.9."""
    graph = Graph((forward(0), put(0)), ((), ()))
    late = Disturbances(failures=(Failure(worker=(0, 0), at_s=1e9, restart_s=1.0),))
    assert ends(graph, [Cost(0.9), Cost(0.2, 10, 1000.0)], late)[0] == 0.9


def test_who_cannot_use_its_share_of_a_capped_link_leaves_it_to_the_others() -> None:
    """Cap 10, links 2 and 100: the first moves 2 a second, the second 8, and 10 once the first is through."""
    graph = Graph((put(0), put(1)), ((), ()))
    found = ends(graph, [Cost(0.0, 2, 2.0), Cost(0.0, 18, 100.0)], Disturbances(shared_bytes_s=10.0))
    assert found == pytest.approx([1.0, 2.0])


def test_uploads_and_downloads_do_not_share() -> None:
    get = Task(Kind.GET_GRADIENT, 0, 1, micro_batch=1, peer=1)
    found = ends(Graph((put(0), get), ((), ())), [Cost(0.0, 10, 10.0)] * 2, Disturbances(shared_bytes_s=10.0))
    assert found == [1.0, 1.0]


def test_a_cold_start_delays_all_that_a_worker_does() -> None:
    graph = Graph((forward(0), put(0), forward(1)), ((), (), ()))
    assert ends(graph, [Cost(1.0)] * 3, Disturbances(cold_start_s=2.5)) == [3.5, 3.5, 3.5]


def test_a_straggler_computes_and_moves_more_slowly() -> None:
    graph = Graph((forward(0), forward(1), put(1)), ((), (), ()))
    costs = [Cost(1.0), Cost(1.0), Cost(0.5, 10, 10.0)]
    assert ends(graph, costs, Disturbances(stragglers={(0, 1): 2.0})) == [1.0, 2.0, 3.0]


def test_noise_comes_from_its_seed_and_has_mean_one() -> None:
    graph = build_graph_of_one_stage(400)
    found = [
        simulate(graph, lambda t: Cost(1.0), disturbances=Disturbances(compute_jitter=0.3, seed=s)) for s in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2]
    assert found[0].duration_s == pytest.approx(800, rel=0.05)
    numbers = log_normal(np.random.default_rng(0), np.full(200_000, 0.3))
    assert (numbers.mean(), numbers.std()) == (pytest.approx(1, abs=0.01), pytest.approx(0.3, abs=0.01))


def build_graph_of_one_stage(micro_batches: int) -> Graph:
    tasks = [forward(0, m) for m in range(micro_batches)]
    tasks += [Task(Kind.BACKWARD, 0, 0, micro_batch=m) for m in range(micro_batches)]
    return Graph(tuple(tasks), ((),) * len(tasks))


def test_a_worker_that_dies_does_the_step_again_and_its_objects_remain() -> None:
    """Stage 0: forward until 1, put until 2, backward 2..5; dies at 3, is back at 7, is through at 7 + 1 + 1 + 3.

    Stage 1 reads at 2 what was put before the death, and is not held up.
    """
    get = Task(Kind.GET_ACTIVATION, 1, 0, micro_batch=0, peer=0, part=0)
    graph = Graph((forward(0), put(0), Task(Kind.BACKWARD, 0, 0, micro_batch=0), get), ((), (0,), (1,), (1,)))
    table = dict(zip(graph.tasks, [1.0, 1.0, 3.0, 0.5], strict=True))
    died = Disturbances(failures=(Failure(worker=(0, 0), at_s=3.0, restart_s=4.0),))
    trace = simulate(graph, lambda task: Cost(table[task]), disturbances=died)
    assert [(e.task.split(".")[0], e.attempt, e.start_s, e.end_s) for e in trace.events] == [
        ("forward", 0, 0.0, 1.0),
        ("put-activation", 0, 1.0, 2.0),
        ("get-activation", 0, 2.0, 2.5),
        ("backward", 0, 2.0, 3.0),
        ("forward", 1, 7.0, 8.0),
        ("put-activation", 1, 8.0, 9.0),
        ("backward", 1, 9.0, 12.0),
    ]


@given(shapes(), st.integers(0, 2**32), disturbances, st.lists(st.floats(0, 30), min_size=1, max_size=3), polls)
def test_after_deaths_everything_is_done_and_nothing_starts_early(
    shape: StepShape, seed: int, found: Disturbances, deaths: list[float], poll_s: float
) -> None:
    graph = build_graph(shape)
    costs = polled(costs_of(graph, lambda task: mixed(task, seed)), graph, poll_s)
    failures = tuple(Failure(worker=(i % shape.stages, 0), at_s=at, restart_s=1.0) for i, at in enumerate(deaths))
    timeline = play(graph, costs, disturbances=replace(found, failures=failures))
    died = {tuple(failure.worker) for failure in failures}
    for i, (task, needs) in enumerate(zip(graph.tasks, graph.needs, strict=True)):
        for need in needs:
            other = graph.tasks[need]
            lost = [lost.end_s for lost in timeline.lost if lost.position == need]
            first_end_s = min([timeline.ends_s[need], *lost])
            local = (other.stage, other.replica) == (task.stage, task.replica)
            assert timeline.starts_s[i] >= (timeline.ends_s[need] if local else first_end_s)
    assert all((graph.tasks[lost.position].stage, graph.tasks[lost.position].replica) in died for lost in timeline.lost)
    assert min(timeline.ends_s) >= 0


def test_disturbances_of_workers_that_there_are_not_are_refused() -> None:
    graph = Graph((forward(0),), ((),))
    with pytest.raises(InvalidValue, match=r"s7\.r0"):
        play(graph, costs_of(graph, lambda t: Cost(1.0)), disturbances=Disturbances(stragglers={(7, 0): 2.0}))


@pytest.mark.parametrize("wrong", [{"contention": 0.5}, {"shared_bytes_s": 0.0}, {"compute_jitter": -1.0}])
def test_impossible_disturbances_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidValue, match=next(iter(wrong))):
        Disturbances(**wrong)  # type: ignore[arg-type]
