"""Samples of a dataset, read and collated into batches: what a model is called with, and the target."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils.data import default_collate

from funcpipe.core.texts import error_text
from funcpipe.errors import DataError, FuncPipeError
from funcpipe.platforms.base import RequestMeter

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
    batch = _collate_tensors(samples, indices) if function is None else function(samples)
    return as_batch(batch, by_name=by_name)


def _collate_tensors(samples: list[Any], indices: Sequence[int]) -> Any:
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
