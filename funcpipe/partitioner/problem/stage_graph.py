"""Every way to cut a model, as a graph: a path through it is the stages of a plan, an edge is one stage.

In a chain, a node is a position between two layers. By hand, for 3 layers: nodes 0..3 are the positions 3, 2, 1, 0
(node 0 is the end of the model), and there is an edge for each pair of them, 6 in all. The path 3 → 2 → 0 is the plan
with the stages [0, 1) and [1, 3).

With skip connections, a position is not enough, since the number of objects that a stage reads and writes depends on
its neighbours: tensors of one stage with the same consumer stages share one object. A node is then a position together
with what the stages behind it still expect from the layers before it: which crossing tensors each of them reads, and
how many objects it has been *assumed* to read and to answer. A stage put in front settles some of these, and only paths
on which every assumption came true reach the first layer. By hand: layer 0 feeds layers 1 and 2, layer 1 feeds layer 2.
The stage [2, 3) reads two tensors, in one object if one stage makes both and in two otherwise: two nodes at position 2,
one for each assumption. The stage [0, 2) leads to the first, [1, 2) to the second.

So each edge has constant bytes and objects, and the cost of a path is the cost of its plan, for any graph of layers.
Nothing is assumed that cannot come true (`crossings`), and no edge is made that only plans of too many stages have
(`borders`): with all cuts pinned there is one path, however entangled the layers are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from funcpipe.core import ModelProfile
from funcpipe.errors import PlanError
from funcpipe.partitioner.cost import IntArray
from funcpipe.partitioner.cost.loads import StageTraffic
from funcpipe.partitioner.problem.borders import Borders
from funcpipe.partitioner.problem.crossings import Counts, Crossings, Key

EDGE_LIMIT = 100_000
"""The edges of the largest stage graph that is searched: what the search of one takes is counted in gigabytes."""


class TooEntangled(PlanError):
    """The stage graph has more edges than its limit, those before layer `first` not counted."""

    def __init__(self, edge_limit: int, first: int) -> None:
        super().__init__(
            f"the layers are too entangled to search all cuts: more than {edge_limit} ways from layer {first} on; "
            "merge layers, or fix some cuts"
        )
        self.first = first


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGraph:
    """Nodes in descending order of position, the end of the model first; an edge is a stage between two nodes.

    Edge e holds the layers first[e] .. stop[e] − 1 and leads from node `before[e]` to node `after[e]` < `before[e]`.
    """

    layers: int
    position: IntArray
    before: IntArray
    after: IntArray
    first: IntArray
    stop: IntArray
    traffic: StageTraffic

    @property
    def start(self) -> int:
        """The node before the first layer."""
        return len(self.position) - 1

    @property
    def end(self) -> int:
        """The node behind the last layer."""
        return 0


@dataclass(slots=True)
class _Edges:
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)


@dataclass(slots=True)
class _Nodes:
    """Positions with what is expected there, in the order in which they were found, by number."""

    keys: list[tuple[int, Key]] = field(default_factory=list)
    stages_behind: list[int] = field(default_factory=list)
    numbers: dict[tuple[int, Key], int] = field(default_factory=dict)
    at_position: list[list[int]] = field(default_factory=list)

    def number(self, position: int, key: Key, stages_behind: int) -> int:
        """The number of a node, which is added unless it is there, with the fewest stages behind it."""
        found = self.numbers.get((position, key))
        if found is None:
            found = self.numbers[position, key] = len(self.keys)
            self.keys.append((position, key))
            self.stages_behind.append(stages_behind)
            self.at_position[position].append(found)
        elif stages_behind < self.stages_behind[found]:
            self.stages_behind[found] = stages_behind
        return found


def build_stage_graph(
    profile: ModelProfile, borders: Borders | None = None, *, edge_limit: int = EDGE_LIMIT
) -> StageGraph:
    """The stage graph of a profile, with the stages of `borders` (None: all).

    Raises TooEntangled when skip connections make it larger than `edge_limit`.
    """
    layers = len(profile.layers)
    borders = borders or Borders.of(layers)
    crossings = Crossings(profile.tensors, borders)
    nodes, edges = _Nodes(at_position=[[] for _ in range(layers + 1)]), _Edges()
    nodes.number(layers, (), 0)
    for first in reversed(range(layers)):
        for stop in borders.stops[first]:
            for after in nodes.at_position[stop]:
                behind = nodes.stages_behind[after] + 1
                if behind > borders.most_behind(first):
                    continue
                for key, counts in crossings.stage(nodes.keys[after][1], first, stop, borders.most - behind):
                    edges.before.append(nodes.number(first, key, behind))
                    edges.after.append(after)
                    edges.counts.append(counts)
            if len(edges.counts) > edge_limit:
                raise TooEntangled(edge_limit, first)
    nodes.number(0, (), layers)  # the last one, even if nothing leads there
    return _useful_part([position for position, _ in nodes.keys], edges, layers)


def _useful_part(position: Sequence[int], edges: _Edges, layers: int) -> StageGraph:
    """The graph without edges that lead nowhere: on every way from them to the first layer some assumption fails."""
    useful = [True] + [False] * (len(position) - 2) + [True]
    kept: list[int] = []
    for edge in reversed(range(len(edges.before))):
        if useful[edges.before[edge]]:
            useful[edges.after[edge]] = True
            kept.append(edge)
    kept.reverse()
    new_number = np.cumsum(useful) - 1
    positions = np.array(position, dtype=np.int64)
    before, after = (np.array(ends, dtype=np.int64)[kept] for ends in (edges.before, edges.after))
    return StageGraph(
        layers=layers,
        position=positions[np.array(useful)],
        before=new_number[before],
        after=new_number[after],
        first=positions[before],
        stop=positions[after],
        traffic=as_traffic([edges.counts[edge] for edge in kept]),
    )


def as_traffic(counts: Sequence[Counts]) -> StageTraffic:
    """The traffic of many edges."""
    columns = np.array(counts, dtype=np.float64).reshape(-1, len(Counts._fields)).T
    return StageTraffic(**dict(zip(Counts._fields, columns, strict=True)))
