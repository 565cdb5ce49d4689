"""The stage graph holds every way to cut, once, with the traffic that the plan's routes have."""

import itertools
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import Stage
from funcpipe.partitioner.cost.evaluate import plan_traffic
from funcpipe.partitioner.cost.loads import StageTraffic
from funcpipe.partitioner.problem.stage_graph import StageGraph, build_stage_graph
from tests.examples import at_most
from tests.partitioner.instances import chain


def paths(graph: StageGraph, node: int) -> Iterator[tuple[int, ...]]:
    if node == graph.end:
        yield ()
    for edge in np.flatnonzero(graph.before == node):
        for rest in paths(graph, int(graph.after[edge])):
            yield (int(edge), *rest)


@at_most(60)
@given(layers=st.integers(1, 6), skips=st.integers(0, 6), seed=st.integers(0, 1000))
def test_every_cut_is_one_path_with_the_traffic_of_its_plan(layers: int, skips: int, seed: int) -> None:
    profile = chain(layers, 1, seed, skips=skips)
    graph = build_stage_graph(profile)
    found = {}
    for path in paths(graph, graph.start):
        cuts = tuple((int(graph.first[edge]), int(graph.stop[edge])) for edge in path)
        assert cuts not in found, "two paths for one way to cut"
        found[cuts] = path
    every = {
        tuple(itertools.pairwise((0, *inner, layers)))
        for count in range(layers)
        for inner in itertools.combinations(range(1, layers), count)
    }
    assert set(found) == every
    for cuts, path in found.items():
        expected = plan_traffic([Stage(first=a, stop=b, size="", memory_mb=1) for a, b in cuts], profile)
        for item in fields(StageTraffic):
            assert getattr(graph.traffic, item.name)[list(path)].tolist() == getattr(expected, item.name).tolist()


def test_a_chain_has_a_node_for_each_position() -> None:
    graph = build_stage_graph(chain(30, 1))
    assert len(graph.position) == 31
    assert len(graph.first) == 30 * 31 / 2
