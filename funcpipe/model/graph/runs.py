"""The runs of a model that it is traced by: small batches of the user's sample, of its lengths and of others.

Where only the user's collate function can make batches, the sizes of inputs follow from the samples, and each may
change by itself: nodes, edges and graphs. So those runs take other samples each, and the free sizes are whatever
differs among them.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from funcpipe.core.cached import cached_property
from funcpipe.errors import DataError, ModelError
from funcpipe.model.graph.equivalence import Example, example
from funcpipe.model.graph.inputs import Collated, CollatedBatches, CutBatches, InputBatches, Signature, batch_of
from funcpipe.model.graph.model_checks import refuse_max_norm, refuse_max_norm_of_calls
from funcpipe.model.graph.symbols import Symbols, symbols_of, symbols_of_collated
from funcpipe.model.graph.user_code import find_line, source_location
from funcpipe.model.tensors import is_weightless, same

Group = tuple[tuple[str, int], ...]
"""Dimensions of inputs, as (input, dimension), that have one size and change together."""


@dataclass(frozen=True)
class ExampleSet:
    """Results of the model itself for inputs of several sizes, and what is free among these sizes.

    The first two examples differ in all free sizes; the last, if there are three, has the sample's lengths. `later` is
    a run with the state that another one has left, if a model keeps such state. `sample` are the shapes of the user's
    inputs.
    """

    examples: list[Example]
    symbols: Symbols
    sample: Mapping[str, tuple[int, ...]]
    later: Example | None = None


class Runs(ABC):
    """Runs a model on small `batches` of the user's samples, which are like the user's `inputs`.

    `saves_tensors` says that its forward pass needs what autograd saves; `later` becomes part of every ExampleSet.
    """

    first: Example

    def __init__(
        self, model: nn.Module, signature: Signature, inputs: Mapping[str, Tensor], batches: InputBatches
    ) -> None:
        if model.training:
            refuse_max_norm(model)
        self._model = model
        self._signature = signature
        self._inputs = inputs
        self.batches = batches
        self.saves_tensors = False
        self.later: Example | None = None

    @property
    @abstractmethod
    def pair(self) -> list[Example]:
        """Two runs of different batch sizes, perhaps of different lengths too."""

    @property
    @abstractmethod
    def same_lengths(self) -> ExampleSet:
        """Runs that differ in the batch size only, where others are possible."""

    @property
    @abstractmethod
    def other_lengths(self) -> ExampleSet | None:
        """Runs that differ in the batch size and in the lengths that may differ; None if there are no such lengths."""

    @property
    @abstractmethod
    def batched(self) -> frozenset[str]:
        """The inputs whose first dimension is the batch."""

    @abstractmethod
    def _run(self, batch: int, seed: int) -> Example:
        """Run on so many samples."""

    def _first(self, batch: int) -> Example:
        """A run with a backward pass. Raises ModelError if the forward changes parameters."""
        parameters = dict(self._model.named_parameters())
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        versions = {name: parameter._version for name, parameter in parameters.items()}
        found = self._run(batch, 0)
        changed = next((name for name, old in before.items() if not same(parameters[name], old)), None)
        if changed is None and all(parameter._version == versions[name] for name, parameter in parameters.items()):
            return found
        try:
            refuse_max_norm_of_calls(lambda: self._run(batch, 0))
            if changed is None:
                return found
            _restore(parameters, before)
            parameter, old = parameters[changed], before[changed]
            line = find_line(self._model, lambda: self._run(batch, 0), lambda: not same(parameter, old))
        finally:
            _restore(parameters, before)
        raise ModelError(
            f"{line or type(self._model).__name__}: the forward pass changes the parameter {changed}, which the "
            "optimiser and other stages would not see; keep what a forward changes in a buffer (register_buffer), "
            "or change it in the optimiser; a part that averages another one is FuncPipe(teachers=…)"
        )

    def _second(self, batch: int) -> Example:
        """A run without a backward pass, for which nothing is saved unless the forward pass itself needs it."""
        try:
            return self._run(batch, 1)
        except Exception:  # noqa: BLE001 - gradients inside a forward pass fail in many ways without what autograd saves
            self.saves_tensors = True
            return self._run(batch, 1)

    def _example(self, inputs: Mapping[str, Tensor], batch: int, seed: int) -> Example:
        saves_tensors = seed == 0 or self.saves_tensors
        return example(
            *(self._model, self._signature, inputs),
            seed=seed,
            backward=seed == 0,
            saves_tensors=saves_tensors,
            samples=batch,
        )

    def _failed(self, failure: Exception) -> ModelError:
        if is_weightless(self._model):
            return ModelError(
                f"the model fails on the sample. {source_location(self._model, failure)[1]}. Its weights are not here: "
                "code must not depend on values that follow from them (item(), if x.sum() > 0, nonzero()); change "
                "that, or give the module itself, without weights="
            )
        return ModelError(
            f"the model fails on the sample. {source_location(self._model, failure)[1]}. Call it with the sample, in "
            "training mode, to see the whole traceback; inputs and types must be those of training"
        )


class CutRuns(Runs):
    """Runs on a few samples of the user's `inputs`, cut or repeated in any dimension."""

    def __init__(self, model: nn.Module, signature: Signature, inputs: Mapping[str, Tensor]) -> None:
        super().__init__(model, signature, inputs, CutBatches(inputs))
        self._free: dict[Group, int] = {}
        self._other: Example | None = None
        self._same: Example | None = None
        self.first, self._second_batch = self._start()

    @property
    def pair(self) -> list[Example]:
        """Two runs of different batch sizes, perhaps of different lengths too."""
        return [self.first, *filter(None, [self._other or self._same])]

    @property
    def batched(self) -> frozenset[str]:
        """The inputs whose first dimension has the size of the first input's."""
        batch = batch_of(self._inputs)
        return frozenset(name for name, tensor in self._inputs.items() if tensor.shape[:1] == (batch,))

    @cached_property
    def same_lengths(self) -> ExampleSet:
        """Runs that differ in the batch size only: the two smallest that the model accepts, and a batch of one."""
        second = self._same or self._run(self._second_batch, 1)
        return self._set([self.first, second, *filter(None, [self._single])], ())

    @cached_property
    def other_lengths(self) -> ExampleSet | None:
        """Runs that differ in the batch size and in the lengths that may differ; None if there are no such lengths."""
        if self._other is None:
            return None
        third = self._single
        if third is None:
            with contextlib.suppress(Exception):  # a batch size that the model refuses
                third = self._run(self._second_batch + 1, 2)
        return self._set([self.first, self._other, *filter(None, [third])], tuple(self._free))

    def _start(self) -> tuple[Example, int]:
        """The first run, and the batch size of the second, which is tried."""
        batch = self.batches.samples
        failure: Exception | None = None
        for one, two in ((2, 3), (2, 4), (batch, 2 * batch), (batch, batch)):
            try:
                first = self._first(one)
                self._find_free(two)
                if self._other is None:
                    self._same = self._second(two)
                return first, two
            except ModelError:
                raise
            except Exception as error:  # noqa: BLE001 - a model may refuse some batch sizes, but not the sample's
                failure = error
        assert failure is not None
        raise self._failed(failure) from failure

    @cached_property
    def _single(self) -> Example | None:
        with contextlib.suppress(Exception):  # such as BatchNorm raises
            return self._run(1, 2)
        return None

    def _find_free(self, batch: int) -> None:
        for lengths in self._attempts():
            with contextlib.suppress(Exception):  # lengths that the model refuses
                self._other = self._run(batch, 1, lengths)
                self._free = lengths

    def _attempts(self) -> Iterator[dict[Group, int]]:
        """Other lengths to try: all at once; if the model refuses that, one more each time."""
        groups = self._groups()
        if len(groups) > 1:
            yield {group: _others(size)[0] for group, size in groups.items()}
        for group, size in groups.items():
            for length in _others(size):
                if group not in self._free:
                    yield {**self._free, group: length}

    def _groups(self) -> dict[Group, int]:
        batch = batch_of(self._inputs)
        found: dict[int, list[tuple[str, int]]] = {}
        for name, tensor in self._inputs.items():
            for dim, size in enumerate(tensor.shape):
                if size > 1 and (dim > 0 or size != batch):
                    found.setdefault(size, []).append((name, dim))
        return {tuple(group): size for size, group in found.items()}

    def _run(self, batch: int, seed: int, lengths: Mapping[Group, int] = {}) -> Example:
        inputs = self.batches.batch(batch, seed)
        for group, length in lengths.items():
            for name, dim in group:
                rows = torch.arange(length) % inputs[name].size(dim)
                inputs[name] = inputs[name].index_select(dim, rows)
        return self._example(inputs, batch, seed)

    def _set(self, examples: list[Example], groups: tuple[Group, ...]) -> ExampleSet:
        lengths = [group[0] for group in groups]
        symbols = symbols_of(self._inputs, [one.inputs for one in examples], lengths)
        sample = {name: tuple(tensor.shape) for name, tensor in self._inputs.items()}
        return ExampleSet(examples, symbols, sample, self.later)


def _others(size: int) -> list[int]:
    """Lengths to try besides `size`: not close to it, so that halves, rounded, are no differences of whole numbers."""
    if size < 4:
        return [size + 2]
    shorter = size - max(2, size // 4 | 1)
    if 3 * shorter == 2 * size:  # as many elements in a batch of three as before in one of two
        shorter -= 1
    return [shorter] if size % 2 or size < 8 else [shorter, size // 2]


def _restore(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])


_COUNTS = (2, 3, 4, 1)
"""The numbers of samples of the runs."""

_PLACES = range(10)
"""The samples at hand with which batches may begin: of these batches, the runs take those that differ most in size."""


class CollatedRuns(Runs):
    """Runs on a few samples each, `collated` as for the user's `inputs`."""

    def __init__(
        self, model: nn.Module, signature: Signature, inputs: Mapping[str, Tensor], collated: Collated
    ) -> None:
        super().__init__(model, signature, inputs, CollatedBatches(signature, collated))
        self._examples = self._start()
        self.first = self._examples[0]

    @property
    def pair(self) -> list[Example]:
        """Two runs of different batch sizes, if the model takes such."""
        return self._examples[:2]

    @property
    def batched(self) -> frozenset[str]:
        """The inputs whose first dimension was the number of samples in all runs, and is so in the user's inputs."""
        counts = [(one.inputs, one.samples) for one in self._examples] + [(self._inputs, self.batches.samples)]
        return frozenset(
            name for name in self._inputs if all(inputs[name].shape[:1] == (count,) for inputs, count in counts)
        )

    @cached_property
    def same_lengths(self) -> ExampleSet:
        """All runs."""
        runs = [one.inputs for one in self._examples]
        symbols = symbols_of_collated(self._inputs, runs, [one.samples for one in self._examples])
        sample = {name: tuple(tensor.shape) for name, tensor in self._inputs.items()}
        return ExampleSet(self._examples, symbols, sample, self.later)

    @property
    def other_lengths(self) -> ExampleSet | None:
        """None: lengths differ already."""
        return None

    def _start(self) -> list[Example]:
        """The runs; if the model or its inputs are for one number of samples alone, all have that many."""
        count, failure = self.batches.samples, Exception()
        for counts in (_COUNTS, (count, 2 * count, 3 * count), (count,) * len(_COUNTS)):
            try:
                self._given = self._unlike(counts)
                found = [self._first(counts[0]), self._second(counts[1])]
            except ModelError:
                raise
            except Exception as error:  # noqa: BLE001 - a model may refuse some batch sizes, but not the sample's
                failure = error
                continue
            for number, samples in enumerate(counts[2:], start=2):
                with contextlib.suppress(Exception):  # such as BatchNorm raises
                    found.append(self._run(samples, number))
            return found
        if isinstance(failure, DataError):
            raise failure
        raise self._failed(failure) from failure

    def _unlike(self, counts: Sequence[int]) -> list[dict[str, Tensor]]:
        """A batch of so many samples for each run, of which each differs from those before it in many sizes."""
        found = [self.batches.batch(counts[0])]
        for samples in counts[1:]:
            batches = [self.batches.batch(samples, place) for place in _PLACES]
            found.append(max(batches, key=lambda batch: sum(_differing_sizes(batch, other) for other in found)))
        return found

    def _run(self, batch: int, seed: int) -> Example:
        return self._example(self._given[seed], batch, seed)


def _differing_sizes(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> int:
    pairs = [pair for name in one for pair in zip(one[name].shape, other[name].shape, strict=False)]
    return sum(a != b for a, b in pairs)
