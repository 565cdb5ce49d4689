"""Replicas that are played once, because others do the same, against all of them played."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.comm.collectives import pattern, transfers
from funcpipe.comm.sum_pattern import Pattern, Transfer
from funcpipe.core import Resource, ScheduleKind, Streams, Sync
from funcpipe.scheduler.graph import StepShape, build_graph
from funcpipe.scheduler.late import LatePart
from funcpipe.scheduler.simulator.costs import Cost, costs_of
from funcpipe.scheduler.simulator.disturbances import Disturbances, Failure
from funcpipe.scheduler.simulator.folded_graph import FoldedGraph, stand_for_others
from funcpipe.scheduler.simulator.simulate import play, play_folded
from funcpipe.scheduler.tasks import Task
from tests.examples import at_most
from tests.scheduler.shapes import chain_routes, drawn, shapes

FEW_SECONDS, FEW_BYTES, FEW_LINKS = (0.0, 0.5, 1.0), (0, 10, 25), (10.0, 20.0)
"""Numbers of which many are equal, so that many tasks end at the same moment."""

PLATFORMS = st.builds(
    Disturbances,
    contention=st.sampled_from([1.0, 1.5]),
    shared_bytes_s=st.sampled_from([None, 5.0, 37.0]),
    shared_cores=st.sampled_from([None, 1, 3]),
    cold_start_s=st.sampled_from([0.0, 1.0]),
)


@st.composite
def even_shapes(draw: st.DrawFn) -> StepShape:
    """Steps in which replicas have as many micro-batches, with parts of late meetings too."""
    drawn_shape = draw(shapes())
    replicas = draw(st.integers(2, 6))
    loading, late, delay = drawn_shape.loading, None, draw(st.integers(1, 3))
    if loading is not None:
        loading = replace(loading, following=replicas * draw(st.integers(0, 2)))
    if draw(st.booleans()):
        late = LatePart(0, delay, draw(st.integers(0, delay - 1)), delay - 1)
    return replace(
        drawn_shape,
        replicas=replicas,
        micro_batches=replicas * draw(st.integers(1, 3)),
        loading=loading,
        joint_loss=draw(st.integers(0, 9)) == 0 and drawn_shape.joint_loss,
        late=late,
    )


@st.composite
def folded_steps(draw: st.DrawFn) -> tuple[StepShape, FoldedGraph]:
    """Steps folded as far as they can be, or by any number of replicas in which that goes."""
    shape = draw(even_shapes())
    turns = [turn for turn in range(shape.turn, shape.replicas + 1, shape.turn) if shape.replicas % turn == 0]
    turn = draw(st.sampled_from(turns))
    return shape, FoldedGraph(build_graph(shape, turn=turn), shape.replicas, turn)


def costs_by(seed: int, latency_s: float, *, few: bool) -> Callable[[Task], Cost]:
    """Costs that do not depend on replica and micro-batch."""

    def cost(task: Task) -> Cost:
        alike = task.kind.value, task.stage, task.part, task.fragment
        first, second, third = (drawn(seed, alike, number) for number in range(3))
        seconds = FEW_SECONDS[int(3 * first)] if few else first
        if task.kind.resource not in (Resource.UPLOAD, Resource.DOWNLOAD):
            return Cost(seconds, processors=(0.2, 0.5, 1.0)[task.stage % 3])
        size = FEW_BYTES[int(3 * second)] if few else round(100 * second)
        return Cost(latency_s + (seconds if first < 0.2 else 0.0), size, FEW_LINKS[int(2 * third)])

    return cost


@given(folded_steps())
def test_all_tasks_and_needs_are_those_of_the_whole_graph(step: tuple[StepShape, FoldedGraph]) -> None:
    whole, folded = build_graph(step[0]), step[1]
    tasks, columns = folded.tasks, folded.all_columns()
    assert tuple(tasks) == whole.tasks
    assert len(tasks) == len(whole.tasks)
    assert [tasks[i] for i in range(len(tasks))] == list(whole.tasks)
    assert (tasks[-1], list(tasks[2:5])) == (whole.tasks[-1], list(whole.tasks[2:5]))
    needs: list[list[int]] = [[] for _ in whole.tasks]
    for source, target in zip(columns.sources.tolist(), columns.targets.tolist(), strict=True):
        needs[target].append(source)
    assert [tuple(each) for each in needs] == list(whole.needs)
    assert columns.replicas.tolist() == [task.replica for task in whole.tasks]
    assert columns.stages.tolist() == [task.stage for task in whole.tasks]


@at_most(20)
@given(folded_steps())
def test_joins_stand_for_what_several_tasks_need(step: tuple[StepShape, FoldedGraph]) -> None:
    whole, columns = build_graph(step[0]), step[1].joined_columns()
    count = len(whole.tasks)
    needs: list[list[int]] = [[] for _ in range(1 + max(count - 1, *columns.targets.tolist()))]
    for source, target in zip(columns.sources.tolist(), columns.targets.tolist(), strict=True):
        needs[target].append(source)
    joins = needs[count:]
    found = [[n for need in own for n in (joins[need - count] if need >= count else [need])] for own in needs[:count]]
    assert [tuple(each) for each in found] == list(whole.needs)
    assert all(len(join) > 1 and max(join) < count for join in joins)
    assert columns.replicas.tolist() == [task.replica for task in whole.tasks]


def test_joins_make_the_needs_of_barriers_few() -> None:
    folded = FoldedGraph.of(small(Sync.THREE_PHASE, 64))
    joined, whole = folded.joined_columns(), folded.all_columns()
    assert len(joined.sources) < 5 * len(joined.kinds)
    assert len(whole.sources) > 40 * len(whole.kinds)


@given(folded_steps(), st.integers(0, 2**32), st.sampled_from([0.0, 0.01, 0.5]), st.booleans(), PLATFORMS)
def test_replicas_that_stand_for_others_start_and_end_each_task_with_them(
    step: tuple[StepShape, FoldedGraph], seed: int, latency_s: float, few: bool, platform: Disturbances
) -> None:
    whole, folded, cost = build_graph(step[0]), step[1], costs_by(seed, latency_s, few=few)
    expected = play(whole, costs_of(whole, cost), disturbances=platform)
    found = play_folded(folded, costs_of(folded.graph, cost), disturbances=platform)
    assert found.trace(run="r") == expected.trace(run="r")
    assert found.duration_s == expected.duration_s


def small(sync: Sync, replicas: int = 4) -> StepShape:
    return StepShape(
        stages=2,
        replicas=replicas,
        micro_batches=2 * replicas,
        routes=chain_routes(2),
        schedule=ScheduleKind.GPIPE,
        sync=sync,
    )


def test_one_replica_is_played_where_all_have_the_same_part() -> None:
    found = {sync: FoldedGraph.of(small(sync)).turn for sync in Sync}
    assert found[Sync.PIPELINED] == found[Sync.STREAMED] == found[Sync.THREE_PHASE] == found[Sync.EXCHANGE] == 1
    assert found[Sync.ALL_REDUCE] == 4
    assert len(FoldedGraph.of(small(Sync.STREAMED, 512)).graph.tasks) < 10_000


@pytest.mark.parametrize("uneven", [{"micro_batches": 9}, {"joint_loss": True}])
def test_replicas_that_do_not_do_the_same_are_all_made(uneven: dict[str, Any]) -> None:
    assert FoldedGraph.of(replace(small(Sync.STREAMED), **uneven)).turn == 4


@pytest.mark.parametrize(
    "found",
    [
        Disturbances(compute_jitter=0.1),
        Disturbances(transfer_jitter=0.1),
        Disturbances(cold_start_s=1.0, cold_start_jitter=0.1),
        Disturbances(stragglers={(1, 3): 2.0}),
        Disturbances(failures=(Failure(worker=(0, 2), at_s=1.0, restart_s=1.0),)),
    ],
)
def test_where_workers_differ_all_are_played(found: Disturbances) -> None:
    shape, cost = small(Sync.PIPELINED), costs_by(1, 0.1, few=False)
    whole, folded = build_graph(shape), FoldedGraph.of(shape)
    costs = costs_of(folded.graph, cost)
    assert stand_for_others(folded, costs, Disturbances())
    assert not stand_for_others(folded, costs, found)
    expected = play(whole, costs_of(whole, cost), disturbances=found).trace(run="r")
    assert play_folded(folded, costs, disturbances=found).trace(run="r") == expected
    even = {(event.task.split(".r")[0], event.start_s, event.end_s) for event in expected.events if event.replica == 0}
    assert even != {(e.task.split(".r")[0], e.start_s, e.end_s) for e in expected.events if e.replica == 3}


def test_without_latencies_all_are_played() -> None:
    folded = FoldedGraph.of(small(Sync.PIPELINED))
    assert not stand_for_others(folded, costs_of(folded.graph, costs_by(1, 0.0, few=True)), Disturbances())


@pytest.mark.parametrize("sync", Sync)
@pytest.mark.parametrize("replicas", [2, 3, 4, 6, 9, 12])
@pytest.mark.parametrize("cut", [None, (1, 1, 1), (3, 2, 2), (6, 3, 1)])
def test_replicas_a_turn_apart_do_the_same_with_peers_as_far_on(
    sync: Sync, replicas: int, cut: tuple[int, int, int] | None
) -> None:
    way = pattern(sync, replicas, None if cut is None else Streams(*cut))
    assert replicas % way.turn == 0
    for replica in range(replicas - way.turn):
        assert transfers(way, replica + way.turn) == moved_on(transfers(way, replica), way)


def moved_on(moves: tuple[Transfer, ...], way: Pattern) -> tuple[Transfer, ...]:
    return tuple(
        move if move.peer is None else replace(move, peer=(move.peer + way.turn) % way.replicas) for move in moves
    )
