"""The sizes of inputs that may change from one micro-batch to the next, and numbers as functions of them.

The model is run for a few choices of its free sizes: the batch size, and the lengths that it accepts. A number that was
24, 27 and 12 where the batch size was 2, 3 and 1 and the length 12, 9 and 12, is their product.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from funcpipe.model.graph.observations import NodeRecord, TensorFacts

BATCH = "batch size"
"""The name of the symbol for the batch size."""


@dataclass(frozen=True)
class Symbol:
    """A free size: that of the dimension `dim` of the model's input `source`, its values in some runs and in the user's
    sample.
    """

    name: str
    source: str
    dim: int
    values: tuple[int, ...]
    sample: int


@dataclass(frozen=True)
class Form:
    """The number `factor` * (`slope` * `symbol` + `offset`), without what is None."""

    offset: int
    slope: int = 0
    symbol: Symbol | None = None
    factor: Symbol | None = None

    @property
    def at_sample(self) -> int:
        """Its value for the user's sample."""
        line = self.offset + (self.slope * self.symbol.sample if self.symbol else 0)
        return line * (self.factor.sample if self.factor else 1)

    @property
    def is_symbol(self) -> bool:
        """Return whether it is a free size itself."""
        return (self.offset, self.slope, self.factor) == (0, 1, None)


@dataclass(frozen=True)
class Symbols:
    """All free sizes of a model's inputs; the batch size, if it is free, is the first."""

    free: tuple[Symbol, ...]

    def of_runs(self, kept: Sequence[int]) -> "Symbols":
        """The free sizes in some of the runs only."""
        return Symbols(tuple(replace(one, values=tuple(one.values[i] for i in kept)) for one in self.free))

    def form(self, numbers: Sequence[int]) -> Form | None:
        """A number that has taken the values `numbers` in the runs, as a function of the free sizes; None if it is none
        of those that are looked for.
        """
        if all(number == numbers[0] for number in numbers):
            return Form(numbers[0])
        found = [form for symbol in self.free if (form := _line(numbers, symbol)) is not None]
        if found:
            return next((form for form in found if form.is_symbol), found[0])
        for factor in self.free:
            if all(number % size == 0 for number, size in zip(numbers, factor.values, strict=True) if size):
                rest = [number // size for number, size in zip(numbers, factor.values, strict=True) if size]
                for symbol in self.free if len(rest) == len(numbers) else ():
                    form = _line(rest, symbol)
                    if form is not None:
                        return replace(form, factor=factor)
        return None

    def at_sample(self, records: Sequence[NodeRecord]) -> NodeRecord:
        """The record of a node for the user's sample, from its records in the runs."""
        first = records[0]
        if len({len(record.leaves) for record in records}) != 1:
            return first
        leaves = [self._leaf(leaves) for leaves in zip(*(record.leaves for record in records), strict=True)]
        return replace(first, leaves=tuple(leaves))

    def _leaf(self, leaves: Sequence[object]) -> object:
        facts = [leaf for leaf in leaves if isinstance(leaf, TensorFacts)]
        if len(facts) != len(leaves) or len({len(leaf.shape) for leaf in facts}) != 1:
            return leaves[0]
        forms = [self.form(sizes) for sizes in zip(*(leaf.shape for leaf in facts), strict=True)]
        shape = [
            form.at_sample if form else self._for_batch([leaf.shape[i] for leaf in facts])
            for i, form in enumerate(forms)
        ]
        symbols = tuple(form.symbol.name if form and form.symbol and form.is_symbol else None for form in forms)
        return replace(facts[0], shape=tuple(shape), symbols=symbols)

    def _for_batch(self, sizes: Sequence[int]) -> int:
        """The size for the user's sample that follows from the runs with the sample's lengths."""
        batch = next((symbol for symbol in self.free if symbol.name == BATCH), None)
        if batch is None:
            return sizes[0]
        lengths = [symbol for symbol in self.free if symbol is not batch]
        alike = [i for i in range(len(sizes)) if all(length.values[i] == length.sample for length in lengths)]
        if not alike:
            return sizes[0]
        line = _line([sizes[i] for i in alike], replace(batch, values=tuple(batch.values[i] for i in alike)))
        return line.at_sample if line else sizes[0]


def _line(numbers: Sequence[int], symbol: Symbol) -> Form | None:
    """The line through `numbers` over the values of `symbol`, if its slope is integral."""
    pairs = list(zip(symbol.values, numbers, strict=True))
    size, number = pairs[0]
    other, far = next((pair for pair in pairs if pair[0] != size), (size, number))
    if other == size or (far - number) % (other - size):
        return None
    slope = (far - number) // (other - size)
    offset = number - slope * size
    return Form(offset, slope, symbol) if all(slope * one + offset == two for one, two in pairs) else None


def symbols_of(
    inputs: Mapping[str, Tensor], runs: Sequence[Mapping[str, Tensor]], lengths: Sequence[tuple[str, int]]
) -> Symbols:
    """The free sizes of a model with the user's `inputs`, which was run on `runs`; `lengths` are a dimension, as
    (input, dimension), for each free length.
    """
    batched = next((name for name, tensor in inputs.items() if tensor.dim() > 0), None)
    ends = [(BATCH, batched, 0)] if batched is not None else []
    ends += [(f"length {i + 1}", name, dim) for i, (name, dim) in enumerate(lengths)]
    return _varying(ends, inputs, runs)


def symbols_of_collated(
    inputs: Mapping[str, Tensor], runs: Sequence[Mapping[str, Tensor]], samples: Sequence[int]
) -> Symbols:
    """The free sizes of a model that was run on collated batches of so many `samples`: all that differ among the runs.

    Dimensions that had the same sizes in all of them are one free size.
    """
    found: dict[tuple[int, ...], tuple[str, int]] = {}
    for name, tensor in inputs.items():
        ranks = {tensor.dim(), *(run[name].dim() for run in runs)}
        for dim in range(tensor.dim() if len(ranks) == 1 else 0):
            found.setdefault((*(run[name].size(dim) for run in runs), tensor.size(dim)), (name, dim))
    counted = [(BATCH, *end) for sizes, end in found.items() if sizes[:-1] == tuple(samples)]
    others = [end for sizes, end in found.items() if sizes[:-1] != tuple(samples)]
    return _varying([*counted[:1], *((f"length {i + 1}", *end) for i, end in enumerate(others))], inputs, runs)


def _varying(
    ends: Sequence[tuple[str, str, int]], inputs: Mapping[str, Tensor], runs: Sequence[Mapping[str, Tensor]]
) -> Symbols:
    """Symbols for dimensions of inputs, without those that had one size in all runs."""
    found = [
        Symbol(title, name, dim, tuple(run[name].size(dim) for run in runs), inputs[name].size(dim))
        for title, name, dim in ends
    ]
    return Symbols(tuple(symbol for symbol in found if len(set(symbol.values)) > 1))
