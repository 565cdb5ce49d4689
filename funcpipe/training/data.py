"""Which samples make up which micro-batch: the same answer in every function, without talking.

The order of an epoch's samples follows from (seed, epoch) alone. Global batches follow one another in that order, the
last of an epoch may be shorter; within a batch, micro-batches do, and again the last may be shorter.
"""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import default_collate

from funcpipe.errors import DataError


@runtime_checkable
class MapDataset(Sized, Protocol):
    """Samples by number: each a tuple of the model's inputs and, last, the target.

    Or a dictionary of the model's keyword arguments, for a model that computes its own loss.
    """

    def __getitem__(self, index: int, /) -> Any:
        """The sample of that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Samples stacked into one batch: what the model is called with, and what its output is compared with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step: the numbers of the samples of each of its micro-batches."""

    number: int
    epoch: int
    micro_batches: tuple[tuple[int, ...], ...]

    @property
    def samples(self) -> int:
        """Samples of the step's global batch."""
        return sum(len(indices) for indices in self.micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How `samples` samples are dealt out over steps; `shuffle` is off for an order that is the dataset's own."""

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
        """Global batches of an epoch, the short last one included."""
        return -(-self.samples // self.global_batch)

    def epoch(self, epoch: int) -> tuple[Step, ...]:
        """The steps of one epoch, numbered from the start of training."""
        order = sample_order(self.samples, self.seed, epoch) if self.shuffle else tuple(range(self.samples))
        first = epoch * self.steps_per_epoch
        return tuple(
            Step(number=first + i, epoch=epoch, micro_batches=_cut(batch, self.micro_batch))
            for i, batch in enumerate(_cut(order, self.global_batch))
        )


def sample_order(samples: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order in which an epoch goes through `samples` samples."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return tuple(torch.randperm(samples, generator=generator).tolist())


def load(dataset: MapDataset, indices: Sequence[int]) -> Loaded:
    """The samples `indices` as one batch. Raises DataError for samples that are neither tuples nor dictionaries."""
    samples = [dataset[index] for index in indices]
    for index, sample in zip(indices, samples, strict=True):
        if not isinstance(sample, Mapping) and not (isinstance(sample, tuple | list) and len(sample) > 1):
            raise DataError(
                f"sample {index} of the dataset is a {type(sample).__name__}; each must be a tuple of the model's "
                "inputs and, last, the target, or a dictionary of the model's arguments"
            )
    batch = default_collate(samples)
    if isinstance(batch, Mapping):
        return Loaded(kwargs=dict(batch))
    *inputs, target = batch
    return Loaded(args=tuple(inputs), target=target)


def _cut(items: Sequence[int], size: int) -> tuple[Any, ...]:
    return tuple(tuple(items[i : i + size]) for i in range(0, len(items), size))
