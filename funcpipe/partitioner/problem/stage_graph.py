"""Every way to cut a model, as a graph: a path through it is the stages of a plan, an edge is one stage.

In a chain, a node is a position between two layers; node 0 is the end of the model. For 3 layers there are 6 edges:

    position    0 ── layer 0 ── 1 ── layer 1 ── 2 ── layer 2 ── 3
    node        3               2               1               0

The path 3 → 2 → 0 is the plan with the stages [0, 1) and [1, 3).

With skip connections, a position is not enough, since the number of objects that a stage reads and writes depends on
its neighbours: tensors of one stage with the same consumer stages share one object. A node is then a position together
with what the stages behind it still expect from the layers before it: which crossing tensors each of them reads, and
how many objects it has been *assumed* to read and to answer. A stage put in front settles some of these, and only paths
on which every assumption came true reach the first layer. By hand: layer 0 feeds layers 1 and 2, layer 1 feeds layer 2.
The stage [2, 3) reads two tensors, in one object if one stage makes both and in two otherwise: two nodes at position 2,
one for each assumption. The stage [0, 2) leads to the first, [1, 2) to the second.

So each edge has constant bytes and objects, and the cost of a path is the cost of its plan, for any graph of layers.
No edge is made that only plans of too many stages have (`cuts.Borders`), and nothing is assumed that cannot come true.
Two tensors certainly come in different objects if different stages behind read them, or if every plan cuts the model
between their producers (or the consumers in front). They certainly share an object if one layer makes both, the same
stages read them, and no layer in front reads only one. By hand: a stage reads a from layer 0, b and c from layer 1, and
a stage behind it reads c as well. c travels alone; a and b share an object or do not, depending on the cut between
layers 0 and 1: the stage reads 2 or 3 objects.

The *loose* graph has one node for each position, whatever skips connect the layers. Bytes are those of any plan with
the stage; how many objects these are, and how many stages send gradients back, is taken to be as few as possible: one.
So a plan takes at least what its path costs, and memory, which does not depend on objects, is exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from funcpipe.core import ModelProfile, TensorProfile
from funcpipe.errors import PlanError
from funcpipe.partitioner.cost import IntArray
from funcpipe.partitioner.cost.loads import StageTraffic
from funcpipe.partitioner.problem.cuts import Borders


class Expectation(NamedTuple):
    """`stages` stages that read the crossing tensors `row`, `reads` more objects, and owe `answers` of gradients."""

    row: tuple[int, ...]
    reads: int
    answers: int
    stages: int


Key = tuple[Expectation, ...]


class Counts(NamedTuple):
    """The traffic of one edge: what `StageTraffic` has for many."""

    forward_out_bytes: int
    forward_out_objects: int
    forward_in_bytes: int
    forward_in_objects: int
    backward_out_bytes: int
    backward_out_objects: int
    backward_in_bytes: int
    backward_in_objects: int


class _Range(NamedTuple):
    """How many objects a row may be read in, and how many gradient objects may be owed for it."""

    fewest_reads: int
    most_reads: int
    fewest_answers: int
    most_answers: int

    def holds(self, reads: int, answers: int, stages_before: int) -> bool:
        """Return whether the numbers can come true when `stages_before` stages at most are in front."""
        if not self.fewest_reads <= reads <= self.most_reads:
            return False
        return self.fewest_answers <= answers <= min(self.most_answers, reads, stages_before)


class Crossings:
    """How the tensors of a profile cross the borders of stages."""

    def __init__(self, tensors: Sequence[TensorProfile], borders: Borders) -> None:
        self._producer: list[int] = []
        self._consumers: list[tuple[int, ...]] = []
        self._forward_bytes: list[int] = []
        self._backward_bytes: list[int] = []
        self._section = borders.section
        self._rows: dict[tuple[int, int], tuple[int, ...]] = {}
        self._ranges: dict[tuple[int, tuple[tuple[int, ...], ...]], list[_Range]] = {}
        self._join(tensors)

    def _join(self, tensors: Sequence[TensorProfile]) -> None:
        """Tensors with the same producer and the same consumers share their objects in every plan, and count as one."""
        number: dict[tuple[int, tuple[int, ...]], int] = {}
        for tensor in tensors:
            ends = tensor.producer, tensor.consumers
            if ends not in number:
                number[ends] = len(number)
                self._producer.append(tensor.producer)
                self._consumers.append(tensor.consumers)
                self._forward_bytes.append(0)
                self._backward_bytes.append(0)
            self._forward_bytes[number[ends]] += tensor.forward_bytes
            self._backward_bytes[number[ends]] += tensor.backward_bytes

    def stage(self, behind: Key, first: int, stop: int, stages_before: int) -> Iterator[tuple[Key, Counts]]:
        """The nodes before the stage [first, stop), seen from the node `behind` it, each with the stage's traffic.

        At most `stages_before` stages will be in front of it.
        """
        made = {i for e in behind for i in e.row if self._producer[i] >= first}
        readers = self._readers(behind, made)
        settled = self._settle(behind, made, readers)
        if settled is None:
            return
        row = self.row(first, stop)
        answered = [(e.stages, [self._backward_bytes[i] for i in e.row if i in made]) for e in behind] if made else []
        counts = Counts(
            forward_out_bytes=sum(self._forward_bytes[i] for i in made),
            forward_out_objects=len(readers),
            forward_in_bytes=sum(self._forward_bytes[i] for i in row),
            forward_in_objects=0,
            backward_out_bytes=sum(self._backward_bytes[i] for i in row),
            backward_out_objects=0,
            backward_in_bytes=sum(stages * sum(some) for stages, some in answered),
            backward_in_objects=sum(stages * any(some) for stages, some in answered),
        )
        for reads, answers, key in self._assumptions(settled, row, first, stages_before):
            yield key, counts._replace(forward_in_objects=reads, backward_out_objects=answers)

    def row(self, first: int, stop: int) -> tuple[int, ...]:
        """The tensors made before `first` that the layers from `first` to `stop` read."""
        if (first, stop) not in self._rows:
            self._rows[first, stop] = tuple(
                i
                for i, (producer, consumers) in enumerate(zip(self._producer, self._consumers, strict=True))
                if producer < first and any(first <= layer < stop for layer in consumers)
            )
        return self._rows[first, stop]

    def _readers(self, behind: Key, made: set[int]) -> set[frozenset[int]]:
        """The objects that carry the tensors `made`, each as the places of the expectations that read it."""
        return {frozenset(place for place, e in enumerate(behind) if i in e.row) for i in made}

    def _settle(self, behind: Key, made: set[int], objects: set[frozenset[int]]) -> Key | None:
        """Return what is still expected once `made` exist; None if an assumption has proved wrong."""
        if not made:
            return behind
        left = []
        for place, e in enumerate(behind):
            row = tuple(i for i in e.row if i not in made)
            reads = e.reads - sum(place in readers for readers in objects)
            answers = e.answers - any(i in made and self._backward_bytes[i] > 0 for i in e.row)
            if row:
                left.append(Expectation(row, reads, answers, e.stages))
            elif reads or answers:
                return None
        return tuple(left)

    def _assumptions(
        self, settled: Key, row: tuple[int, ...], first: int, stages_before: int
    ) -> Iterator[tuple[int, int, Key]]:
        """How many objects a stage with this row may read and how many gradient objects it may owe, with the node then.

        Stages that read the same row read and owe as many.
        """
        found: dict[tuple[int, ...], Expectation] = {}
        for e in settled:
            if not self._add(found, e):
                return
        rows = tuple(sorted({*found, row} if row else found))
        ranges = dict(zip(rows, self._ranges_of(rows, first), strict=True))
        if not all(ranges[e.row].holds(e.reads, e.answers, stages_before) for e in found.values()):
            return
        if not row:
            yield 0, 0, tuple(found[some] for some in rows)
            return
        same, fits = found.get(row), ranges[row]
        for reads in range(fits.fewest_reads, fits.most_reads + 1) if same is None else (same.reads,):
            for answers in range(fits.fewest_answers, fits.most_answers + 1) if same is None else (same.answers,):
                if fits.holds(reads, answers, stages_before):
                    joined = dict(found)
                    self._add(joined, Expectation(row, reads, answers, 1))
                    yield reads, answers, tuple(joined[some] for some in rows)

    def _add(self, found: dict[tuple[int, ...], Expectation], e: Expectation) -> bool:
        """Add an expectation, equal rows as one; false if equal rows expect unequal numbers."""
        other = found.get(e.row)
        if other is None:
            found[e.row] = e
        elif (other.reads, other.answers) != (e.reads, e.answers):
            return False
        else:
            counted = any(self._backward_bytes[i] > 0 for i in e.row)
            found[e.row] = e._replace(stages=other.stages + e.stages if counted else 1)
        return True

    def _ranges_of(self, rows: tuple[tuple[int, ...], ...], first: int) -> list[_Range]:
        """For each row what may be assumed of it, when stages behind layer `first` expect `rows`, and no others."""
        key = first, rows
        if key not in self._ranges:
            readers: dict[int, int] = {}
            for place, row in enumerate(rows):
                for i in row:
                    readers[i] = readers.get(i, 0) | 1 << place
            self._ranges[key] = [self._range(row, readers, first) for row in rows]
        return self._ranges[key]

    def _range(self, row: tuple[int, ...], readers: dict[int, int], first: int) -> _Range:
        apart, distinct, makers, sections = set(), set(), set(), set()
        for i in row:
            producer = self._producer[i]
            in_front = tuple(layer for layer in self._consumers[i] if layer < first)
            section = self._section[producer]
            others = frozenset(self._section[layer] for layer in in_front) - {section}
            apart.add((section, readers[i], others))
            distinct.add((producer, readers[i], in_front))
            if self._backward_bytes[i] > 0:
                makers.add(producer)
                sections.add(section)
        return _Range(len(apart), len(distinct), len(sections), len(makers))


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
