"""The stage graph of any model as small as a chain's: what crosses the borders of a stage, from below.

A node is a position, as in a chain, whatever skips connect the layers. Bytes that a stage makes, reads and answers are
those of any plan with it; how many objects these are, and how many stages send gradients back, depends on the other
stages, and is taken to be as few as possible: one. So a plan takes at least what its path costs, and memory, which does
not depend on objects, is exact: where no path fits, no plan does.

By hand: layer 0 feeds layers 1 and 2, layer 1 feeds layer 2. The edge [2, 3) reads two tensors in one object, which
holds for the plan [0, 2), [2, 3); in the plan of three stages it reads two objects.
"""

import numpy as np

from funcpipe.core import ModelProfile
from funcpipe.partitioner.problem.borders import Borders
from funcpipe.partitioner.problem.crossings import Counts
from funcpipe.partitioner.problem.stage_graph import StageGraph, as_traffic


def loose_stage_graph(profile: ModelProfile, borders: Borders) -> StageGraph:
    """The graph with an edge for each stage of `borders`."""
    layers = len(profile.layers)
    edges = [(first, stop) for first in reversed(range(layers)) for stop in borders.stops[first]]
    first, stop = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    return StageGraph(
        layers=layers,
        position=np.arange(layers, -1, -1),
        before=layers - first,
        after=layers - stop,
        first=first,
        stop=stop,
        traffic=as_traffic([_least_traffic(profile, *edge) for edge in edges]),
    )


def _least_traffic(profile: ModelProfile, first: int, stop: int) -> Counts:
    made = [t for t in profile.tensors if first <= t.producer < stop <= t.consumers[-1]]
    read = [t for t in profile.tensors if t.producer < first and any(first <= layer < stop for layer in t.consumers)]
    returned, answered = sum(t.backward_bytes for t in made), sum(t.backward_bytes for t in read)
    return Counts(
        forward_out_bytes=sum(t.forward_bytes for t in made),
        forward_out_objects=bool(made),
        forward_in_bytes=sum(t.forward_bytes for t in read),
        forward_in_objects=bool(read),
        backward_out_bytes=answered,
        backward_out_objects=bool(answered),
        backward_in_bytes=returned,
        backward_in_objects=bool(returned),
    )
