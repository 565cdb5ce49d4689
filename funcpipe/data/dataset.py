"""A map-style dataset whose samples lie in shards in object storage."""

import bisect
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from funcpipe.data.shard_cache import ShardCache
from funcpipe.data.shard_format import SampleReader, Shard, ShardFormat
from funcpipe.errors import DataError
from funcpipe.platforms.base import Storage

SHUFFLE_SHARDS = 16
"""The default of the shards that samples are shuffled in at a time, at most."""

Transform = Callable[[Mapping[str, Any]], Any]


class ShardedDataset:
    """The samples of `shards`, each downloaded when the first of its samples is read.

    A sample is what `transform` makes of the format's own, a mapping by names of columns; without one, that mapping.
    `cache_bytes` bounds what shards may take on disk, for each process that reads. `shuffle_shards` is for the order
    of training: half of the shards that fit into the cache, so that the next ones can come while these are read.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        shard_format: ShardFormat,
        storage: Storage,
        *,
        cache_bytes: int,
        shuffle_shards: int | None,
        transform: Transform | None,
    ) -> None:
        self._shards, self._format, self._storage, self._cache_bytes = shards, shard_format, storage, cache_bytes
        self._transform = transform
        self._ends = list(itertools.accumulate(shard.samples for shard in shards))
        largest_bytes = max((shard.local_bytes for shard in shards), default=0)
        fitting = cache_bytes // max(2 * largest_bytes, 1)
        self.shuffle_shards = shuffle_shards or max(min(fitting, SHUFFLE_SHARDS), 1)
        self._made: tuple[int, ShardCache] | None = None

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """The number of samples in each shard."""
        return tuple(shard.samples for shard in self._shards)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"the dataset has {len(self)} samples, and none at {index}")
        index %= len(self)
        number = bisect.bisect_right(self._ends, index)
        sample = self._reader(number)[index - (self._ends[number] - self._shards[number].samples)]
        return sample if self._transform is None else self._transform(sample)

    def _reader(self, number: int) -> SampleReader:
        reader, expected = self._cache.reader(number), self._shards[number].samples
        if len(reader) != expected:
            key = self._shards[number].key
            raise DataError(
                f"{key} holds {len(reader)} samples, and {expected} by the index: it has changed; write the index "
                "again, or start a new run"
            )
        return reader

    @property
    def _cache(self) -> ShardCache:
        """The cache of this process; a forked process makes its own."""
        if self._made is None or self._made[0] != os.getpid():
            self._made = os.getpid(), ShardCache(self._shards, self._format, self._storage, self._cache_bytes)
        return self._made[1]
