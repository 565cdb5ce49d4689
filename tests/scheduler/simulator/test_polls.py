"""Objects that come while they are waited for, and are found by polls."""

from dataclasses import replace
from statistics import mean

import pytest

from funcpipe.core import Streams, Sync
from funcpipe.scheduler.graph import Graph, build_graph
from funcpipe.scheduler.simulator.costs import Cost, costs_of
from funcpipe.scheduler.simulator.disturbances import Disturbances, Failure
from funcpipe.scheduler.simulator.folded_graph import FoldedGraph
from funcpipe.scheduler.simulator.simulate import play, play_folded
from funcpipe.scheduler.tasks import Kind, Task
from tests.scheduler.simulator.test_disturbances import polled
from tests.support.plans import sum_shape

PUT = Task(Kind.PUT_ACTIVATION, 0, 0, micro_batch=0, part=0)
GET = Task(Kind.GET_ACTIVATION, 1, 0, micro_batch=0, peer=0, part=0)
BUSY = Task(Kind.FORWARD, 1, 0, micro_batch=1)
SHARED = Disturbances(failures=(Failure(worker=(0, 0), at_s=1e9, restart_s=1.0),))
"""Nothing happens by it, but it is played by the simulator for what happens to others."""


@pytest.mark.parametrize("disturbances", [Disturbances(), SHARED])
def test_what_comes_while_it_is_waited_for_is_found_up_to_a_poll_late(disturbances: Disturbances) -> None:
    """The put ends at 3 s, and the get takes 0.5 s."""
    graph = Graph((PUT, GET), ((), (0,)))
    costs = costs_of(graph, lambda task: Cost(3.0) if task == PUT else Cost(0.5, poll_s=0.5))
    found = [play(graph, costs, disturbances=replace(disturbances, seed=seed)) for seed in range(200)]
    starts_s = [one.starts_s[1] for one in found]
    assert all(3.0 <= start_s < 3.5 for start_s in starts_s)
    assert mean(starts_s) == pytest.approx(3.25, abs=0.03)
    assert [one.ends_s[1] for one in found] == pytest.approx([start_s + 0.5 for start_s in starts_s])


@pytest.mark.parametrize("disturbances", [Disturbances(), SHARED])
def test_what_is_there_before_it_is_asked_for_is_found_at_once(disturbances: Disturbances) -> None:
    graph = Graph((PUT, BUSY, GET), ((), (), (1, 0)))
    costs = costs_of(graph, lambda task: Cost({PUT: 3.0, BUSY: 5.0}.get(task, 0.5), poll_s=0.5 * task.kind.is_get))
    assert play(graph, costs, disturbances=disturbances).starts_s[2] == 5.0


@pytest.mark.parametrize("replicas", [2, 5, 16])
def test_the_last_of_many_is_found_a_whole_poll_late(replicas: int) -> None:
    """Each of n replicas waits for the others' objects: for the last of k, k / (k + 1) of a poll on average."""
    graph = build_graph(sum_shape(Sync.EXCHANGE, replicas, Streams(1, 1, 1)))
    costs = polled(costs_of(graph, lambda task: Cost(float(task.kind.is_put or task.kind.is_get))), graph, 1.0)
    late_s = [play(graph, costs, disturbances=Disturbances(seed=seed)).duration_s - 2.0 for seed in range(100)]
    waiting = replicas * (replicas - 1)
    assert mean(late_s) == pytest.approx(waiting / (waiting + 1), abs=0.06)


def test_replicas_that_poll_do_not_stand_for_each_other() -> None:
    shape = sum_shape(Sync.EXCHANGE, 6, Streams(1, 1, 1))
    folded = FoldedGraph.of(shape)
    assert folded.mirrors > 1
    graph, seconds = build_graph(shape), lambda task: Cost(1.0 if task.kind.is_put or task.kind.is_get else 0.0)
    costs = polled(costs_of(folded.graph, seconds), folded.graph, 1.0)
    found = play_folded(folded, costs)
    whole = play(graph, polled(costs_of(graph, seconds), graph, 1.0))
    assert (list(found.starts_s), list(found.ends_s)) == (list(whole.starts_s), list(whole.ends_s))
