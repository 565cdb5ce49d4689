"""A map-style dataset whose samples lie in shards in object storage, and the cache of downloaded shards."""

import bisect
import itertools
import os
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funcpipe.data.shard_format import SampleReader, Shard, ShardFormat
from funcpipe.errors import DataError
from funcpipe.platforms.base import Storage

SHUFFLE_SHARDS = 16
"""The default of the shards that samples are shuffled in at a time, at most."""

Transform = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class _Cached:
    path: Path
    bytes: int
    reader: SampleReader


class ShardCache:
    """The shards that were read last: as many as fit into `limit_bytes`, and the newest one in any case.

    Several threads may read; one of them downloads a shard while the others wait.
    """

    def __init__(self, shards: Sequence[Shard], shard_format: ShardFormat, storage: Storage, limit_bytes: int) -> None:
        self._shards, self._format, self._storage, self._limit_bytes = shards, shard_format, storage, limit_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="funcpipe-data-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._cached: OrderedDict[int, _Cached] = OrderedDict()
        self._lock = threading.Lock()

    def reader(self, number: int) -> SampleReader:
        """Return the reader of the shard of that number, which is downloaded if need be."""
        with self._lock:
            if number not in self._cached:
                self._make_room(self._shards[number].local_bytes)
                self._cached[number] = self._bring(number)
            self._cached.move_to_end(number)
            return self._cached[number].reader

    @property
    def bytes(self) -> int:
        """Bytes that the cached shards take."""
        return sum(cached.bytes for cached in self._cached.values())

    def _make_room(self, wanted_bytes: int) -> None:
        while self._cached and self.bytes + wanted_bytes > self._limit_bytes:
            _, oldest = self._cached.popitem(last=False)
            oldest.path.unlink()  # a reader that still needs it has it open

    def _bring(self, number: int) -> _Cached:
        path, shard = self._folder / str(number), self._shards[number]
        try:
            self._format.fetch(self._storage, shard, path)
            return _Cached(path, path.stat().st_size, self._format.reader(path, shard))
        except BaseException:
            path.unlink(missing_ok=True)
            raise


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
