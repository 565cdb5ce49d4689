"""The samples of each micro-batch: every function computes the same answer without communicating.

The order of an epoch's samples follows from (seed, epoch) alone. It is cut into global batches, and these into
micro-batches; the last of each may be shorter. With 10 samples in the order 7 0 3 9 1 4 8 2 6 5, a global batch of 6
and micro-batches of 4:

    step 0: (7 0 3 9) (1 4)        step 1: (8 2 6 5)

Of a dataset that lies in shards, `shards.py` makes the order.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import default_collate

from funcpipe.core.texts import error_text
from funcpipe.errors import DataError, FuncPipeError
from funcpipe.platforms.request_meter import RequestMeter
from funcpipe.training.shards import ShardedEpoch, ShardedSamples

Collate = Callable[[list[Any]], Any]
"""Makes one batch of samples: a tuple of the model's inputs and, last, the target, or a dictionary of arguments.

Or a tuple of such a dictionary and the target.
"""


@runtime_checkable
class MapDataset(Sized, Protocol):
    """A map-style dataset. A sample is a tuple of the model's inputs and, last, the target.

    Or it is a dictionary of the model's keyword arguments, alone or in a tuple with the target.
    """

    def __getitem__(self, index: int, /) -> Any:
        """Return the sample at `index`."""


@runtime_checkable
class MeteredFactory(Protocol):
    """A factory of a dataset that lies in object storage, of which the requests are counted where it is read."""

    def __call__(self) -> MapDataset:
        """Return the dataset."""

    def open(self, meter: RequestMeter) -> MapDataset:
        """Return the dataset; `meter` counts what it asks of the storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBatch:
    """Collated samples: what the model is called with, and the target that its output is compared with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step, maybe its epoch's last: the indices of the samples in each of its micro-batches."""

    number: int
    epoch: int
    micro_batches: tuple[tuple[int, ...], ...]
    ends_epoch: bool = False

    @property
    def samples(self) -> int:
        """The number of samples in the step's global batch."""
        return sum(len(indices) for indices in self.micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """A dataset of `samples` samples, cut into steps; without `shuffle`, in the dataset's own order.

    With `shards`, the order is one that lets each replica read shards of its own.
    """

    samples: int
    global_batch: int
    micro_batch: int
    seed: int
    shuffle: bool = True
    shards: ShardedSamples | None = None

    def __post_init__(self) -> None:
        if self.samples < self.global_batch:
            raise DataError(
                f"the dataset has {self.samples} samples, too few for one global batch of {self.global_batch}; "
                "plan for a smaller batch or give more data"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch, including a short last one."""
        return -(-self.samples // self.global_batch)

    @property
    def micro_batch_sizes(self) -> frozenset[int]:
        """The numbers of samples in micro-batches, the last of a global batch and of an epoch included."""
        sizes = set()
        for samples in {min(self.global_batch, self.samples), self.samples % self.global_batch}:
            sizes |= {min(self.micro_batch, samples), samples % self.micro_batch}
        return frozenset(sizes - {0})

    def beside(self, index: int) -> int:
        """Return a sample that may lie in one micro-batch with that at `index`: the first one that does, or of all."""
        if self.shuffle:
            return 0 if self.micro_batch > 1 else index
        return index - index % self.global_batch % self.micro_batch

    def micro_batches_of(self, step: int) -> int:
        """Return the number of micro-batches of step `step`, numbered from the start of training."""
        return -(-self.samples_of(step) // self.micro_batch)

    def samples_of(self, step: int) -> int:
        """Return the number of samples of step `step`, numbered from the start of training."""
        first_sample = step % self.steps_per_epoch * self.global_batch
        return min(self.global_batch, self.samples - first_sample)

    def steps_from(self, first: int, epochs: int) -> Iterator[Step]:
        """Yield the steps of `epochs` epochs of training, without the first `first` steps."""
        for epoch in range(first // self.steps_per_epoch, epochs):
            yield from self._steps(epoch, max(first - epoch * self.steps_per_epoch, 0))

    def epoch(self, epoch: int) -> tuple[Step, ...]:
        """Return the steps of one epoch, numbered from the start of training."""
        return tuple(self._steps(epoch, 0))

    def _steps(self, epoch: int, first: int) -> Iterator[Step]:
        """Yield the steps of one epoch, without its first `first`; each is made when it is asked for."""
        batch = self._batches_of(epoch)
        for number in range(first, self.steps_per_epoch):
            yield Step(
                number=epoch * self.steps_per_epoch + number,
                epoch=epoch,
                micro_batches=_cut(batch(number), self.micro_batch),
                ends_epoch=number == self.steps_per_epoch - 1,
            )

    def _batches_of(self, epoch: int) -> Callable[[int], Sequence[int]]:
        """Return a function that gives the samples of each global batch of an epoch, by its number."""
        if self.shards is not None and self.shuffle:
            return ShardedEpoch(self.shards, global_batch=self.global_batch, seed=self.seed, epoch=epoch).batch
        order = sample_order(self.samples, self.seed, epoch) if self.shuffle else range(self.samples)
        return lambda number: order[number * self.global_batch : (number + 1) * self.global_batch]


def sample_order(samples: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the order of the sample indices 0 … `samples` - 1 in one epoch."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return tuple(torch.randperm(samples, generator=generator).tolist())


@contextlib.contextmanager
def user_code_errors(what: str) -> Iterator[None]:
    """Raise DataError, which begins with `what`, for any error of code that is not funcpipe's own."""
    try:
        yield
    except FuncPipeError:
        raise
    except Exception as error:
        raise DataError(f"{what}: {error_text(error)}".rstrip(": ")) from error


@dataclass(frozen=True)
class KeywordCollate:
    """A collate function for samples or batches of which the first of two parts holds the model's arguments by name.

    Without a `function`, torch's own way.
    """

    function: Collate | None

    def __call__(self, samples: list[Any]) -> LoadedBatch:
        """Return the batch of `samples`."""
        return collated(samples, range(len(samples)), self)


def is_default_collate(collate: Collate | None) -> bool:
    """Return True if batches are made as torch makes them without a collate function."""
    return collate is None or collate == KeywordCollate(None)


def load_batch(dataset: MapDataset, indices: Sequence[int], collate: Collate | None = None) -> LoadedBatch:
    """Return the samples at `indices` as one batch, made by `collate` or as torch does without one.

    Raises DataError, also for whatever the dataset or `collate` raise.
    """
    return one_batch(read_samples(dataset, indices), indices, collate)


def read_samples(dataset: MapDataset, indices: Sequence[int]) -> list[Any]:
    """Return the samples at `indices`. Raises DataError for whatever the dataset raises."""
    samples = []
    for index in indices:
        with user_code_errors(f"sample {index} of the dataset, which has {len(dataset)}, cannot be read"):
            samples.append(dataset[index])
    return samples


def one_batch(samples: list[Any], indices: Sequence[int], collate: Collate | None = None) -> LoadedBatch:
    """Return `samples`, which lie at `indices`, as one batch, made by `collate` or as torch does without one.

    Raises DataError, also for whatever `collate` raises.
    """
    with user_code_errors(f"the collate_fn fails on samples {few(indices)} of the dataset"):
        return collated(samples, indices, collate)


def collated(samples: list[Any], indices: Sequence[int], collate: Collate | None) -> LoadedBatch:
    """Return the same. Raises what `collate` raises, and DataError for what it returns."""
    by_name = isinstance(collate, KeywordCollate)
    function = collate.function if isinstance(collate, KeywordCollate) else collate
    batch = collate_tensors(samples, indices) if function is None else function(samples)
    return as_batch(batch, by_name=by_name)


def collate_tensors(samples: list[Any], indices: Sequence[int]) -> Any:
    """Return `samples`, which lie at `indices`, stacked as torch does it. Raises DataError if they differ in shape."""
    for index, sample in zip(indices, samples, strict=True):
        if not _is_sample(sample):
            raise DataError(
                f"sample {index} of the dataset is a {type(sample).__name__}; each must be a tuple of the model's "
                "inputs and, last, the target, or a dictionary of the model's arguments"
            )
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, KeyError) as error:
        found = _first_difference(samples, indices)
        different, way_out = (error, "return tensors, arrays or numbers") if found is None else found
        raise DataError(
            f"samples {few(indices)} of the dataset cannot be put into one batch: {different}; {way_out} in the "
            "dataset, or give a DataLoader whose collate_fn makes a batch of them: DataLoader(dataset, collate_fn=...)"
        ) from error


def as_batch(batch: Any, *, by_name: bool = False) -> LoadedBatch:
    """Return a collated batch in the form that training uses; of two parts, the first may hold the arguments `by_name`.

    The target of a dictionary alone is what it has for labels. Raises DataError if it is neither a tuple nor a
    dictionary.
    """
    if isinstance(batch, LoadedBatch):
        return batch
    if isinstance(batch, Mapping):
        return LoadedBatch(kwargs=dict(batch), target=_labels_in(batch))
    if not _is_sample(batch):
        raise DataError(
            f"the collate_fn returns a {type(batch).__name__}; it must return a tuple of the model's inputs and, last, "
            "the target, or a dictionary of the model's arguments"
        )
    *inputs, target = batch
    if by_name and len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return LoadedBatch(kwargs=dict(inputs[0]), target=target)
    return LoadedBatch(args=tuple(inputs), target=target)


def _labels_in(arguments: Mapping[str, Any]) -> Any:
    """Return the labels that models of Hugging Face take: one label, several by name, or the ends of an answer."""
    found = {name: value for name, value in arguments.items() if "label" in name}
    found = found or {name: arguments[name] for name in ("start_positions", "end_positions") if name in arguments}
    return next(iter(found.values())) if len(found) == 1 else found or None


def _is_sample(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, tuple | list) and len(value) > 1)


def _first_difference(samples: Sequence[Any], indices: Sequence[int]) -> tuple[str, str] | None:
    """Return how the first sample that differs from the first of all does, in words, and what to do."""
    for index, sample in zip(indices, samples, strict=True):
        found = _difference(samples[0], sample, "")
        if found is not None:
            return f"{found[0]} in samples {indices[0]} and {index}", found[1]
    return None


def _difference(one: Any, other: Any, name: str) -> tuple[str, str] | None:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape == other.shape:
            return None
        return f"tensors {name} have the shapes {tuple(one.shape)}, {tuple(other.shape)}", "pad them to one shape"
    way_out = "give all of them the same parts"
    mappings, sequences = ([isinstance(value, kind) for value in (one, other)] for kind in (Mapping, tuple | list))
    if not any((*mappings, *sequences)):
        return None
    if not all(mappings) and not all(sequences):
        described = f"a {type(one).__name__} and a {type(other).__name__}"
        return f"{name} is {described}" if name else f"they are {described}", way_out
    ours, theirs = (list(value) if all(mappings) else list(range(len(value))) for value in (one, other))
    if set(ours) != set(theirs):
        described = f"{ours} and {theirs}" if all(mappings) else f"{len(ours)} and {len(theirs)} parts"
        return f"{name} holds {described}" if name else f"they hold {described}", way_out
    parts = (_difference(one[key], other[key], f"{name}[{key!r}]" if name else repr(key)) for key in ours)
    return next((part for part in parts if part is not None), None)


def few(indices: Sequence[int]) -> str:
    """Return the first of some indices, in words."""
    return ", ".join(map(str, indices[:4])) + (", …" if len(indices) > 4 else "")


def _cut(items: Sequence[int], size: int) -> tuple[Any, ...]:
    return tuple(tuple(items[i : i + size]) for i in range(0, len(items), size))
