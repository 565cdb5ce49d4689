"""Factories of datasets that lie in object storage: what they find at the client travels with them to functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from funcpipe.core import MB, checks
from funcpipe.data.dataset import ShardedDataset, Transform
from funcpipe.data.shard_format import Shard, ShardFormat
from funcpipe.errors import DataError
from funcpipe.platforms.base import OpenStorage, Storage
from funcpipe.platforms.catalog import FIRST_S, open_storage
from funcpipe.platforms.request_meter import RequestMeter

CACHE_MB = 256
"""The default of the MB that a function keeps of shards in its temporary folder, which has 512 MB on clouds."""


Find = Callable[[Storage, str], tuple[Sequence[Shard], ShardFormat]]
"""A function that finds the shards below a URL and their format; raises DataError if there is none."""


@dataclass(frozen=True, kw_only=True)
class DataFactory:
    """A factory of the dataset in shards at `url`.

    The index is read once, when it is first called: then its shards are part of it, also in functions, which all train
    on the same samples even if more are written meanwhile. `find` finds the shards and their format. `open_storage`
    opens the storage at a URL.
    """

    url: str
    find: Find
    transform: Transform | None = None
    cache_mb: float = CACHE_MB
    shuffle_shards: int | None = None
    open_storage: OpenStorage = open_storage
    _found: list[tuple[Sequence[Shard], ShardFormat]] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive("cache_mb", self.cache_mb)
        if self.shuffle_shards is not None:
            checks.at_least("shuffle_shards", self.shuffle_shards, 1)

    def __call__(self) -> ShardedDataset:
        """The dataset. Raises DataError if there is none of this format, StorageError if it cannot be read."""
        return self.open(RequestMeter())

    def open(self, meter: RequestMeter) -> ShardedDataset:
        """The dataset; `meter` counts what it asks of the storage."""
        storage = self.open_storage(self.url, first_s=None if self._found else FIRST_S, meter=meter)
        if not self._found:
            self._found.append(self.find(storage, self.url))
        shards, shard_format = self._found[0]
        if not any(shard.samples for shard in shards):
            raise DataError(f"{self.url}: there are no samples; give the URL of a dataset that has been written")
        return ShardedDataset(
            shards,
            shard_format,
            storage,
            cache_bytes=int(self.cache_mb * MB),
            shuffle_shards=self.shuffle_shards,
            transform=self.transform,
        )
