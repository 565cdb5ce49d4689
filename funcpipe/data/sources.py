"""Factories of datasets that lie in object storage: one for each format, and one that detects the format."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from funcpipe.core import MB, checks
from funcpipe.data.dataset import ShardedDataset, Transform
from funcpipe.data.litdata_format import LitDataFormat
from funcpipe.data.mds_format import MdsFormat
from funcpipe.data.parquet_format import ParquetFormat
from funcpipe.data.shard_format import INDEX, Shard, ShardFormat
from funcpipe.data.webdataset_format import WebDatasetFormat
from funcpipe.errors import DataError, KeyMissing
from funcpipe.platforms.base import OpenStorage, RequestMeter, Storage
from funcpipe.platforms.catalog import FIRST_S, open_storage

CACHE_MB = 256
"""The default of the MB that a function keeps of shards in its temporary folder, which has 512 MB on clouds."""


Find = Callable[[Storage, str], tuple[Sequence[Shard], ShardFormat]]
"""A function that finds the shards below a URL and their format; raises DataError if there is none."""


@dataclass(frozen=True, kw_only=True)
class DataFactory:
    """A factory of the dataset in shards at `url`.

    The index is read once, when it is first called, at the client: then its shards travel with it to functions, which
    all train on the same samples even if more are written meanwhile. `find` finds the shards and their format.
    `open_storage` opens the storage at a URL.
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


def mds(
    url: str, *, transform: Transform | None = None, cache_mb: float = CACHE_MB, shuffle_shards: int | None = None
) -> DataFactory:
    """A dataset of MosaicML Streaming, in the folder that `MDSWriter` has written.

    Samples are dictionaries by the names of columns, or what `transform` makes of one: a tuple of the model's inputs
    and, last, the target, or a dictionary of the model's arguments. Each function keeps up to `cache_mb` megabytes of
    shards (of 2^20 bytes); samples are shuffled in `shuffle_shards` shards at a time.
    """
    return DataFactory(
        url=url, find=MdsFormat().index, transform=transform, cache_mb=cache_mb, shuffle_shards=shuffle_shards
    )


def litdata(
    url: str, *, transform: Transform | None = None, cache_mb: float = CACHE_MB, shuffle_shards: int | None = None
) -> DataFactory:
    """A dataset of LitData, in the folder that `litdata.optimize` has written; see `mds` for the rest."""
    return DataFactory(
        url=url, find=LitDataFormat().index, transform=transform, cache_mb=cache_mb, shuffle_shards=shuffle_shards
    )


def parquet(
    url: str,
    *,
    columns: Sequence[str] | None = None,
    output: str | None = "torch",
    transform: Transform | None = None,
    cache_mb: float = CACHE_MB,
    shuffle_shards: int | None = None,
) -> DataFactory:
    """The rows of all Parquet files below a URL, as samples of Hugging Face `datasets` in the format `output`.

    A row group is a shard. Of its columns only `columns` are read, by default all. With an `output` other than None,
    `datasets` cuts the zeros off the end of bytes: read columns of bytes with None. See `mds` for the rest.
    """
    chosen = ParquetFormat(columns=None if columns is None else tuple(columns), output=output)
    return DataFactory(
        url=url, find=chosen.index, transform=transform, cache_mb=cache_mb, shuffle_shards=shuffle_shards
    )


def webdataset(
    url: str,
    *,
    index: str = INDEX,
    images: str = "PIL",
    transform: Transform | None = None,
    cache_mb: float = CACHE_MB,
    shuffle_shards: int | None = None,
) -> DataFactory:
    """The tar files of WebDataset below a URL that the object `index` names, an index of `wids`.

    Samples are dictionaries by extension (`{"jpg": …, "cls": 3, "__key__": …}`), which need a `transform`. Pictures
    become what `images` says: PIL or numpy. See `mds` for the rest.
    """
    chosen = WebDatasetFormat(index_key=index, images=images)
    return DataFactory(
        url=url, find=chosen.index, transform=transform, cache_mb=cache_mb, shuffle_shards=shuffle_shards
    )


def from_url(url: str) -> DataFactory:
    """The dataset at `url`, in whichever format lies there: MDS, LitData, WebDataset with an index, or Parquet."""
    if not urlsplit(url).scheme:
        raise DataError(f"{url!r} is no URL of a dataset; give one such as s3://bucket/prefix or file:///folder")
    return DataFactory(url=url, find=_find)


def _find(storage: Storage, url: str) -> tuple[Sequence[Shard], ShardFormat]:
    """The shards of a dataset, and its format by what lies there."""
    try:
        index = json.loads(storage.get(INDEX))
    except KeyMissing:
        if any(key.endswith(".parquet") for key in storage.list("")):
            return ParquetFormat().index(storage, url)
        raise DataError(
            f"{url}: there is neither an {INDEX} (of MosaicML Streaming, LitData or wids) nor a file that ends in "
            ".parquet; give the folder of such a dataset, or a factory of another"
        ) from None
    except ValueError as error:
        raise DataError(f"{url}: {INDEX} is not JSON: {error}") from error
    known: dict[str, ShardFormat] = {"shards": MdsFormat(), "chunks": LitDataFormat(), "shardlist": WebDatasetFormat()}
    for name, shard_format in known.items():
        if name in index:
            return shard_format.index(storage, url)
    raise DataError(f"{url}: {INDEX} is of no format that is known: it has none of {', '.join(known)}")
