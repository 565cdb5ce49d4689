"""Tar files of WebDataset, with an index that says which there are: read by wids, WebDataset's library for that."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funcpipe.data.shard_format import INDEX, SampleReader, Shard, load_index, missing_package
from funcpipe.errors import DataError
from funcpipe.platforms.base import Storage

_WANTED = "make the index with: wids index --output index.json *.tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebDatasetFormat:
    """WebDataset with the index at `index_key`; pictures become `images`, PIL or numpy."""

    index_key: str = INDEX
    images: str = "PIL"

    def index(self, storage: Storage, url: str) -> tuple[Sequence[Shard], "WebDatasetFormat"]:
        """The shards of the index; their names are below the URL."""
        listed = load_index(storage, url, self.index_key, _WANTED).get("shardlist")
        if not isinstance(listed, list):
            raise DataError(f"{url}: {self.index_key} is not an index of wids; {_WANTED}")
        return [self._shard(entry, url) for entry in listed], self

    def fetch(self, storage: Storage, shard: Shard, target: Path) -> None:
        """Download a shard."""
        target.write_bytes(storage.get(shard.key))

    def reader(self, path: Path, shard: Shard) -> SampleReader:
        """Return a reader of its samples: dictionaries by extension, without the dot, and `__key__`."""
        try:
            from wids.wids import IndexedTarSamples
            from wids.wids_decode import default_decoder
        except ImportError as error:
            raise missing_package(error, "webdataset") from error
        with path.open("rb") as stream:  # mapped into memory, so that it stays readable
            return _Samples(IndexedTarSamples(stream=stream), default_decoder, self.images)

    def _shard(self, entry: dict[str, Any], url: str) -> Shard:
        name = str(entry["url"])
        base = url.partition("?")[0].rstrip("/") + "/"
        key = name.removeprefix(base)
        if "://" in key or key.startswith("/"):
            raise DataError(f"{url}: its index names {name}, which does not lie below it; give names relative to it")
        return Shard(key=key, samples=entry["nsamples"], local_bytes=entry.get("filesize", 0))


class _Samples:
    def __init__(self, samples: Any, decode: Any, images: str) -> None:
        self._samples, self._decode, self._images = samples, decode, images

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> dict[str, Any]:
        decoded = self._decode(self._samples[number], format=self._images)
        return {name.removeprefix("."): value for name, value in decoded.items()}
