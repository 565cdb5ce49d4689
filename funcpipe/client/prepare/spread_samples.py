"""Some samples spread over a dataset, to try the loss on: the first ones may be similar."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from funcpipe.errors import DataError
from funcpipe.model.tensors import flatten
from funcpipe.training.data import Collate, LoadedBatch, MapDataset, load_batch

_MOST = 32
_MOST_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class SpreadSamples:
    """The samples at `indices`, which are spread over a dataset; `load` loads any as one batch, or raises DataError.

    A global batch has `global_batch` of them, a micro-batch `micro_batch`, as far as there are so many.
    """

    load: Callable[[Sequence[int]], LoadedBatch]
    indices: tuple[int, ...]
    micro_batch: int
    global_batch: int

    @cached_property
    def batch(self) -> LoadedBatch | None:
        """All of them, if they make one batch."""
        try:
            return self.load(self.indices)
        except DataError:  # a collate_fn may be for batches of one size
            return None

    def unlike(self, count: int) -> list[int]:
        """So many indices: of samples in which a number comes often, as where they are padded, and seldom."""
        half = count // 2
        return [*self._ordered[: count - half], *(self._ordered[-half:] if half else [])]

    @cached_property
    def _ordered(self) -> list[int]:
        """The indices by how often the most frequent number of a sample comes in it, in the most distinctive tensor.

        Where it comes equally often in all, as in classes, by the numbers themselves.
        """
        tensors = [] if self.batch is None else _whole_numbers(self.batch, len(self.indices))
        often = [[int(row.unique(return_counts=True)[1].max()) for row in tensor] for tensor in tensors]
        totals = [[int(row.sum()) for row in tensor] for tensor in tensors]
        distinctive = max(often, key=_span, default=list(self.indices))
        if not _span(distinctive):
            distinctive = max(totals, key=_span, default=list(self.indices))
        pairs = zip(distinctive, self.indices, strict=True)
        return [index for _, index in sorted(pairs)]


def spread_samples(
    dataset: MapDataset,
    collate: Collate | None,
    *,
    first: LoadedBatch,
    samples: int,
    micro_batch: int,
    global_batch: int,
) -> SpreadSamples:
    """Some of the first `samples` samples of `dataset`, which fit into memory beside its `first` micro-batch.

    Of samples in shards, they come from one part of the dataset.
    """
    one_bytes = sum(leaf.nbytes for leaf in _tensors(first)) // min(micro_batch, samples) + 1
    count = min(samples, max(2, min(_MOST, _MOST_BYTES // one_bytes)))
    if hasattr(dataset, "shard_sizes"):
        begin = min(samples // 2, samples - count)
        indices = list(range(begin, begin + count))
    else:
        indices = sorted(random.Random(0).sample(range(samples), count))
    return SpreadSamples(
        load=lambda chosen: load_batch(dataset, chosen, collate),
        indices=tuple(indices),
        micro_batch=min(micro_batch, samples),
        global_batch=min(global_batch, samples),
    )


def _tensors(batch: LoadedBatch) -> list[Tensor]:
    leaves: list[Any] = flatten((batch.args, dict(batch.kwargs), batch.target))[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _whole_numbers(batch: LoadedBatch, samples: int) -> list[Tensor]:
    """The tensors of whole numbers that have a row for each sample."""
    return [
        leaf
        for leaf in _tensors(batch)
        if leaf.dim()
        and leaf.size(0) == samples
        and leaf.numel()
        and not leaf.dtype.is_floating_point
        and not leaf.is_complex()
    ]


def _span(values: Sequence[float]) -> float:
    return max(values) - min(values)
