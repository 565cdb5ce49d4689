"""How tensors cross the borders of a stage: its bytes and objects, given what the stages behind it expect.

How many objects a stage reads is not known before the stages in front of it are. It is *assumed*, for each number that
can come true. Two tensors certainly come in different objects if different stages behind read them, or if every plan
cuts the model between their producers (or the consumers in front). They certainly share an object if one layer makes
both, the same stages read them, and no layer in front reads only one. By hand: a stage reads a from layer 0, b and c
from layer 1, and a stage behind it reads c as well. c travels alone; a and b share an object or do not, depending on
the cut between layers 0 and 1: the stage reads 2 or 3 objects.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from funcpipe.core import TensorProfile
from funcpipe.partitioner.problem.borders import Borders


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
        """Whether the numbers can come true when `stages_before` stages at most are in front."""
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
        """What is still expected once `made` exist; None if an assumption has proved wrong."""
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
