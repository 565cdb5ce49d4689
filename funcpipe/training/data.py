"""Which samples make up which micro-batch: every function computes the same answer without communicating.

The order of an epoch's samples follows from (seed, epoch) alone. It is cut into global batches, and these into
micro-batches; the last of each may be shorter. With 10 samples in the order 7 0 3 9 1 4 8 2 6 5, a global batch of 6
and micro-batches of 4:

    step 0: (7 0 3 9) (1 4)        step 1: (8 2 6 5)
"""

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import default_collate

from funcpipe.errors import DataError


@runtime_checkable
class MapDataset(Sized, Protocol):
    """A map-style dataset. A sample is a tuple of the model's inputs and, last, the target.

    For a model that computes its own loss, a sample is a dictionary of the model's keyword arguments.
    """

    def __getitem__(self, index: int, /) -> Any:
        """The sample at `index`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBatch:
    """Collated samples: what the model is called with, and the target that its output is compared with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step: the indices of the samples in each of its micro-batches."""

    number: int
    epoch: int
    micro_batches: tuple[tuple[int, ...], ...]

    @property
    def samples(self) -> int:
        """How many samples the step's global batch has."""
        return sum(len(indices) for indices in self.micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How a dataset of `samples` samples is cut into steps; without `shuffle`, in the dataset's own order."""

    samples: int
    global_batch: int
    micro_batch: int
    seed: int
    shuffle: bool = True

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
        """How many samples micro-batches have, the last of a global batch and of an epoch included."""
        sizes = set()
        for samples in {min(self.global_batch, self.samples), self.samples % self.global_batch}:
            sizes |= {min(self.micro_batch, samples), samples % self.micro_batch}
        return frozenset(sizes - {0})

    def micro_batches_of(self, step: int) -> int:
        """How many micro-batches step `step` has, numbered from the start of training."""
        first_sample = step % self.steps_per_epoch * self.global_batch
        return -(-min(self.global_batch, self.samples - first_sample) // self.micro_batch)

    def steps_from(self, first: int, epochs: int) -> Iterator[Step]:
        """The steps of `epochs` epochs of training, without the first `first` steps."""
        for epoch in range(first // self.steps_per_epoch, epochs):
            yield from (step for step in self.epoch(epoch) if step.number >= first)

    def epoch(self, epoch: int) -> tuple[Step, ...]:
        """The steps of one epoch, numbered from the start of training."""
        order = sample_order(self.samples, self.seed, epoch) if self.shuffle else tuple(range(self.samples))
        first = epoch * self.steps_per_epoch
        return tuple(
            Step(number=first + i, epoch=epoch, micro_batches=_cut(batch, self.micro_batch))
            for i, batch in enumerate(_cut(order, self.global_batch))
        )


def sample_order(samples: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order of the sample indices 0 … `samples` - 1 in one epoch."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return tuple(torch.randperm(samples, generator=generator).tolist())


def load_batch(dataset: MapDataset, indices: Sequence[int]) -> LoadedBatch:
    """The samples at `indices` as one batch. Raises DataError for samples that are neither tuples nor dictionaries."""
    samples = [dataset[index] for index in indices]
    for index, sample in zip(indices, samples, strict=True):
        if not isinstance(sample, Mapping) and not (isinstance(sample, tuple | list) and len(sample) > 1):
            raise DataError(
                f"sample {index} of the dataset is a {type(sample).__name__}; each must be a tuple of the model's "
                "inputs and, last, the target, or a dictionary of the model's arguments"
            )
    batch = default_collate(samples)
    if isinstance(batch, Mapping):
        return LoadedBatch(kwargs=dict(batch))
    *inputs, target = batch
    return LoadedBatch(args=tuple(inputs), target=target)


def _cut(items: Sequence[int], size: int) -> tuple[Any, ...]:
    return tuple(tuple(items[i : i + size]) for i in range(0, len(items), size))
