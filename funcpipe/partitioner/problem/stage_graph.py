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
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from funcpipe.core import ModelProfile, TensorProfile
from funcpipe.errors import PlanError
from funcpipe.partitioner.cost.arrays import IntArray
from funcpipe.partitioner.cost.loads import StageTraffic


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


@dataclass(frozen=True, slots=True)
class _Expectation:
    """`count` stages that read the crossing tensors `row`, `reads` more objects, and owe `answers` gradient objects."""

    row: tuple[int, ...]
    reads: int
    answers: int
    count: int


_Key = tuple[_Expectation, ...]


class _Counts(NamedTuple):
    """The traffic of one edge: what `StageTraffic` has for many."""

    forward_out_bytes: int
    forward_out_objects: int
    forward_in_bytes: int
    forward_in_objects: int
    backward_out_bytes: int
    backward_out_objects: int
    backward_in_bytes: int
    backward_in_objects: int


@dataclass(slots=True)
class _Edges:
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    counts: list[_Counts] = field(default_factory=list)


def build_stage_graph(
    profile: ModelProfile, *, admits: Callable[[int, int], bool] | None = None, edge_limit: int = 500_000
) -> StageGraph:
    """The stage graph of a profile, with the stages [first, stop) that `admits` admits (None: all).

    Raises PlanError when skip connections make it larger than `edge_limit`.
    """
    layers = len(profile.layers)
    crossing = _Crossing(profile.tensors)
    nodes: list[tuple[int, _Key]] = [(layers, ())]
    number: dict[tuple[int, _Key], int] = {nodes[0]: 0}
    at_position: list[list[int]] = [[] for _ in range(layers)] + [[0]]
    edges = _Edges()
    for first in reversed(range(layers)):
        for stop in range(first + 1, layers + 1):
            if admits is not None and not admits(first, stop):
                continue
            for after in at_position[stop]:
                for key, counts in crossing.stage(nodes[after][1], first, stop):
                    node = (first, key)
                    if node not in number:
                        number[node] = len(nodes)
                        nodes.append(node)
                        at_position[first].append(number[node])
                    edges.before.append(number[node])
                    edges.after.append(after)
                    edges.counts.append(counts)
        if len(edges.counts) > edge_limit:
            raise PlanError(
                f"the layers are too entangled to search all cuts: more than {edge_limit} ways from layer {first} on; "
                "merge layers, or fix some cuts"
            )
    return _useful_part([position for position, _ in nodes], edges, layers)


def _useful_part(position: Sequence[int], edges: _Edges, layers: int) -> StageGraph:
    """The graph without edges that lead nowhere: on every way from them to the first layer some assumption fails."""
    useful = [False] * (len(position) - 1) + [True]
    kept = []
    for edge in reversed(range(len(edges.before))):
        if useful[edges.before[edge]]:
            useful[edges.after[edge]] = True
            kept.append(edge)
    kept.reverse()
    new_number = np.cumsum(useful) - 1
    positions = np.array(position, dtype=np.int64)
    before, after = np.array(edges.before)[kept], np.array(edges.after)[kept]
    return StageGraph(
        layers=layers,
        position=positions[np.array(useful)],
        before=new_number[before],
        after=new_number[after],
        first=positions[before],
        stop=positions[after],
        traffic=_traffic([edges.counts[edge] for edge in kept]),
    )


def _traffic(counts: Sequence[_Counts]) -> StageTraffic:
    columns = np.array(counts, dtype=np.float64).reshape(-1, len(_Counts._fields)).T
    return StageTraffic(**dict(zip(_Counts._fields, columns, strict=True)))


class _Crossing:
    """How tensors cross the borders of a stage, given what the stages behind it expect."""

    def __init__(self, tensors: Sequence[TensorProfile]) -> None:
        self.tensors = tensors
        self.has_gradient = [tensor.backward_bytes > 0 for tensor in tensors]
        self.rows: dict[tuple[int, int], tuple[int, ...]] = {}

    def stage(self, behind: _Key, first: int, stop: int) -> Iterator[tuple[_Key, _Counts]]:
        """The nodes before the stage [first, stop), seen from the node `behind` it, each with the stage's traffic."""
        made = {i for e in behind for i in e.row if self.tensors[i].producer >= first}
        settled = self._settle(behind, made)
        if settled is None:
            return
        out_bytes, out_objects = self._sent(behind, made)
        grad_bytes, grad_objects = self._answered(behind, made)
        row = self._row(first, stop)
        read_bytes = sum(self.tensors[i].forward_bytes for i in row)
        answer_bytes = sum(self.tensors[i].backward_bytes for i in row)
        for reads, answers in self._assumptions(row, settled):
            key = self._joined(settled, _Expectation(row, reads, answers, 1))
            if key is not None:
                yield (
                    key,
                    _Counts(
                        forward_out_bytes=out_bytes,
                        forward_out_objects=out_objects,
                        forward_in_bytes=read_bytes,
                        forward_in_objects=reads,
                        backward_out_bytes=answer_bytes,
                        backward_out_objects=answers,
                        backward_in_bytes=grad_bytes,
                        backward_in_objects=grad_objects,
                    ),
                )

    def _row(self, first: int, stop: int) -> tuple[int, ...]:
        """The tensors made before `first` that the layers from `first` to `stop` read."""
        if (first, stop) not in self.rows:
            self.rows[first, stop] = tuple(
                i
                for i, tensor in enumerate(self.tensors)
                if tensor.producer < first and any(first <= layer < stop for layer in tensor.consumers)
            )
        return self.rows[first, stop]

    def _groups(self, behind: _Key, made: set[int]) -> dict[frozenset[int], list[int]]:
        """Tensors that share an object, by the expectations that read it."""
        groups: dict[frozenset[int], list[int]] = {}
        for i in sorted(made):
            readers = frozenset(place for place, e in enumerate(behind) if i in e.row)
            groups.setdefault(readers, []).append(i)
        return groups

    def _sent(self, behind: _Key, made: set[int]) -> tuple[int, int]:
        return sum(self.tensors[i].forward_bytes for i in made), len(self._groups(behind, made))

    def _answered(self, behind: _Key, made: set[int]) -> tuple[int, int]:
        """Bytes and objects of gradients that come back for the tensors `made`."""
        total, objects = 0, 0
        for e in behind:
            with_gradient = [i for i in e.row if i in made and self.has_gradient[i]]
            total += e.count * sum(self.tensors[i].backward_bytes for i in with_gradient)
            objects += e.count * bool(with_gradient)
        return total, objects

    def _settle(self, behind: _Key, made: set[int]) -> _Key | None:
        """What is still expected once `made` exist; None if an assumption has proved wrong."""
        groups = self._groups(behind, made)
        left = []
        for place, e in enumerate(behind):
            row = tuple(i for i in e.row if i not in made)
            reads = e.reads - sum(place in readers for readers in groups)
            answers = e.answers - any(i in made and self.has_gradient[i] for i in e.row)
            if not self._can_hold(row, reads, answers):
                return None
            if row:
                left.append(_Expectation(row, reads, answers, e.count))
        return tuple(left)

    def _can_hold(self, row: tuple[int, ...], reads: int, answers: int) -> bool:
        producers = {self.tensors[i].producer for i in row if self.has_gradient[i]}
        return bool(row) <= reads <= len(row) and bool(producers) <= answers <= min(len(producers), reads)

    def _assumptions(self, row: tuple[int, ...], settled: _Key) -> Iterator[tuple[int, int]]:
        """How many objects a stage with this row may read and how many gradient objects it may owe, and no others.

        A stage behind it that expects the same row reads and owes as many.
        """
        for e in settled:
            if e.row == row:
                yield e.reads, e.answers
                return
        producers = {self.tensors[i].producer for i in row if self.has_gradient[i]}
        for reads in range(bool(row), len(row) + 1):
            for answers in range(bool(producers), min(len(producers), reads) + 1):
                yield reads, answers

    def _joined(self, settled: _Key, new: _Expectation) -> _Key | None:
        """`settled` and `new` in one order, equal ones as one; None if equal rows expect unequal numbers."""
        found: dict[tuple[int, ...], _Expectation] = {}
        for e in (*settled, new) if new.row else settled:
            other = found.get(e.row)
            if other is None:
                found[e.row] = e
            elif (other.reads, other.answers) != (e.reads, e.answers):
                return None
            else:
                counted = any(self.has_gradient[i] for i in e.row)
                found[e.row] = _Expectation(e.row, e.reads, e.answers, other.count + e.count if counted else 1)
        return tuple(found[row] for row in sorted(found))
