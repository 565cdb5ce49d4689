"""The first micro-batch of a dataset, and whether others can be cut from it or must be collated.

torch's own way and most collate functions put samples one below the other, so that rows of a batch are a batch. Others
do not: graphs lie in one tensor, sequences are packed, or time comes before the batch. One more sample decides: it adds
one to the first dimension of a batch, and changes nothing else.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from funcpipe.errors import DataError
from funcpipe.model.graph.isolation import preserve_state
from funcpipe.model.tensors import flatten
from funcpipe.training.data import (
    Collate,
    KeywordCollate,
    LoadedBatch,
    MapDataset,
    collated,
    few,
    load_batch,
    read_samples,
    user_code_errors,
)

KEPT_SAMPLES = 10
"""The samples, spread over the dataset, that are kept to be collated while a model is traced."""

SPREAD = 8
"""The micro-batches, spread over the dataset, of which the largest is profiled."""


@dataclass(frozen=True)
class KeptSamples:
    """Samples of a dataset from which `collate` makes batches; a micro-batch has so many `samples`."""

    kept: Sequence[Any]
    collate: Collate
    samples: int

    def arguments(self, samples: int, offset: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with so many samples, beginning at `offset`; they repeat if there are too few."""
        chosen = [self.kept[(offset + i) % len(self.kept)] for i in range(samples)]
        batch = _collated(chosen, self.collate, f"{samples} samples")
        return batch.args, dict(batch.kwargs)


@dataclass(frozen=True)
class FirstBatch:
    """A micro-batch, and how others are made: as `collate` says, which torch does without one.

    They are `collated` of samples at hand, or cut from it if that is None.
    """

    batch: LoadedBatch
    collate: Collate | None = None
    collated: KeptSamples | None = None


def first_batch(dataset: MapDataset, micro_batch: int, collate: Collate | None, model: nn.Module) -> FirstBatch:
    """Return the first micro-batch of `dataset`, as `model` takes it.

    Raises DataError, also for whatever the dataset or `collate` raise.
    """
    indices = range(min(micro_batch, len(dataset)))
    if collate is None:
        batch = load_batch(dataset, indices)
        return FirstBatch(_by_name(batch), KeywordCollate(None)) if _goes_by_name(batch, model) else FirstBatch(batch)
    samples = read_samples(dataset, indices)
    batch = _collated(samples, collate, f"samples {few(indices)} of the dataset")
    if _goes_by_name(batch, model):
        batch, collate = _by_name(batch), KeywordCollate(collate)
    end = samples[0] if hasattr(dataset, "shard_sizes") else read_samples(dataset, [len(dataset) - 1])[0]
    if _can_be_cut([*samples, end], collate):
        return FirstBatch(batch, collate)
    return FirstBatch(batch, collate, kept_samples(dataset, collate, len(samples)))


def _goes_by_name(batch: LoadedBatch, model: nn.Module) -> bool:
    """Return True if the only input is a dictionary of arguments of `model`, not one that its forward takes whole."""
    if len(batch.args) != 1 or not isinstance(batch.args[0], Mapping):
        return False
    forward, given = inspect.signature(model.forward), batch.args[0]
    if given.keys().isdisjoint(forward.parameters):
        return False
    try:
        forward.bind(**given)
    except TypeError:
        return len(forward.parameters) > 1
    return True


def _by_name(batch: LoadedBatch) -> LoadedBatch:
    return LoadedBatch(kwargs=dict(batch.args[0]), target=batch.target)


def largest_batch(dataset: MapDataset, micro_batch: int, collate: Collate | None, model: nn.Module) -> FirstBatch:
    """Return the micro-batch of so many samples with the largest inputs of some that are spread over `dataset`.

    Raises DataError as `first_batch` does, and for a dataset without so many samples.
    """
    check_enough(dataset, micro_batch)
    first = first_batch(dataset, micro_batch, collate, model)
    if first.collate is None or hasattr(dataset, "shard_sizes"):
        return first
    others = [
        _collated(read_samples(dataset, indices), first.collate, f"samples {few(indices)} of the dataset")
        for indices in spread(len(dataset), micro_batch, SPREAD)
    ]
    return replace(first, batch=max([first.batch, *others], key=_input_bytes))


def check_enough(dataset: MapDataset, micro_batch: int) -> None:
    """Raise DataError for a dataset that does not fill a micro-batch."""
    if len(dataset) < micro_batch:
        raise DataError(
            f"the dataset has {len(dataset)} samples, too few for one micro-batch of {micro_batch}; "
            "profile with a smaller micro_batch or give more data"
        )


def spread(samples: int, micro_batch: int, batches: int) -> Iterator[range]:
    """Yield the indices of so many micro-batches, from the first to the last of the dataset."""
    last = samples - micro_batch
    for number in range(batches):
        first = last * number // max(1, batches - 1)
        yield range(first, first + micro_batch)


def _input_bytes(batch: LoadedBatch) -> int:
    leaves = flatten((batch.args, dict(batch.kwargs)))[0]
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def kept_samples(dataset: MapDataset, collate: Collate, samples: int) -> KeptSamples:
    """Samples that are spread over the dataset; the first ones of a dataset that lies in shards."""
    count = min(KEPT_SAMPLES, len(dataset))
    among = count if hasattr(dataset, "shard_sizes") else len(dataset)
    indices = [first for (first,) in spread(among, 1, count)]
    return KeptSamples(read_samples(dataset, indices), collate, samples)


def _collated(samples: Sequence[Any], collate: Collate, what: str) -> LoadedBatch:
    """Return a batch of `samples`, which a collate function that takes items out of them leaves as they are."""
    copies = [copy.copy(sample) if isinstance(sample, dict | list) else sample for sample in samples]
    with preserve_state(nn.Module()), user_code_errors(f"the collate_fn fails on {what}"):
        return collated(copies, range(len(copies)), collate)


def _can_be_cut(samples: Sequence[Any], collate: Collate) -> bool:
    """Return True if rows of the inputs of a batch are samples."""
    try:
        batch = _collated(samples, collate, f"{len(samples)} samples")
        longer = _collated([*samples, samples[-1]], collate, f"{len(samples) + 1} samples")
    except DataError:  # of a function for batches of one size
        return True
    leaves, tree = flatten((batch.args, dict(batch.kwargs)))
    others, other_tree = flatten((longer.args, dict(longer.kwargs)))
    if tree.paths("") != other_tree.paths(""):
        return False
    pairs = [(a, b) for a, b in zip(leaves, others, strict=True) if isinstance(a, Tensor) and isinstance(b, Tensor)]
    if any(one.is_nested for one, _ in pairs):
        return True  # which tracing refuses
    count = len(samples)
    grown = [
        (count, *one.shape[1:]) == one.shape and (count + 1, *one.shape[1:]) == other.shape for one, other in pairs
    ]
    return any(grown) and all(
        grows or one.shape == other.shape for grows, (one, other) in zip(grown, pairs, strict=True)
    )
