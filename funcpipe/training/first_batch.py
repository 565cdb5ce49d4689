"""The first micro-batch of a dataset, and whether others can be cut from it or must be collated.

torch's own way and most collate functions put samples one below the other, so that rows of a batch are a batch. Others
do not: graphs lie in one tensor, sequences are packed, or time comes before the batch. One sample more tells: it makes
the first dimension of a batch longer by one, and changes nothing else.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from funcpipe.errors import DataError
from funcpipe.model.graph.isolation import preserve_state
from funcpipe.model.graph.tree import flatten
from funcpipe.training.data import (
    Collate,
    LoadedBatch,
    MapDataset,
    as_batch,
    calling_the_users,
    few,
    load_batch,
    read_samples,
)

AT_HAND = 10
"""How many samples, spread over the dataset, are kept to be collated while a model is traced."""


@dataclass(frozen=True)
class SamplesAtHand:
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
    """A micro-batch, and the samples of which others are `collated`; None if others can be cut from it."""

    batch: LoadedBatch
    collated: SamplesAtHand | None = None


def first_batch(dataset: MapDataset, micro_batch: int, collate: Collate | None) -> FirstBatch:
    """The first micro-batch of `dataset`. Raises DataError, also for whatever the dataset or `collate` raise."""
    indices = range(min(micro_batch, len(dataset)))
    if collate is None:
        return FirstBatch(load_batch(dataset, indices))
    samples = read_samples(dataset, indices)
    batch = _collated(samples, collate, f"samples {few(indices)} of the dataset")
    if _can_be_cut(batch, samples, collate):
        return FirstBatch(batch)
    return FirstBatch(batch, samples_at_hand(dataset, collate, len(samples)))


def samples_at_hand(dataset: MapDataset, collate: Collate, samples: int) -> SamplesAtHand:
    """Samples that are spread over the dataset; the first ones of a dataset that lies in shards."""
    count = min(AT_HAND, len(dataset))
    last = count - 1 if hasattr(dataset, "shard_sizes") else len(dataset) - 1
    indices = [last * i // max(1, count - 1) for i in range(count)]
    return SamplesAtHand(read_samples(dataset, indices), collate, samples)


def _collated(samples: Sequence[Any], collate: Collate, what: str) -> LoadedBatch:
    """A batch of `samples`, which a collate function that takes items out of them leaves as they are."""
    copies = [copy.copy(sample) if isinstance(sample, dict | list) else sample for sample in samples]
    with preserve_state(nn.Module()), calling_the_users(f"the collate_fn fails on {what}"):
        return as_batch(collate(copies))


def _can_be_cut(batch: LoadedBatch, samples: Sequence[Any], collate: Collate) -> bool:
    """Whether rows of the inputs of `batch` are samples."""
    try:
        longer = _collated([*samples, samples[0]], collate, f"{len(samples) + 1} samples")
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
