"""Chunks of LitData, decoded by its own item loader."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from funcpipe.data.shard_format import INDEX, FramedFile, SampleReader, Shard, load_index, missing_package
from funcpipe.errors import DataError
from funcpipe.platforms.base import Storage

_WANTED = "give the folder that litdata.optimize has written (its `output_dir`)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LitDataFormat:
    """LitData's format; `config` is the index's entry on all chunks."""

    config: dict[str, Any] = field(default_factory=dict)

    def index(self, storage: Storage, url: str) -> tuple[Sequence[Shard], "LitDataFormat"]:
        """The chunks by `index.json`; raises DataError for those of other item loaders, and for encrypted ones."""
        found = load_index(storage, url, INDEX, _WANTED)
        chunks, config = found.get("chunks"), found.get("config")
        if not isinstance(chunks, list) or not isinstance(config, dict):
            raise DataError(f"{url}: {INDEX} is not LitData's; {_WANTED}")
        loader = config.get("item_loader") or "PyTreeLoader"
        if loader != "PyTreeLoader" or config.get("encryption"):
            encrypted = ", encrypted" if config.get("encryption") else ""
            raise DataError(
                f"{url}: its chunks are for the item loader {loader}{encrypted}; those of the usual one, "
                "PyTreeLoader, are read here, unencrypted"
            )
        if (level := config.get("compression_level")) not in (None, "chunk"):
            raise DataError(f"{url}: its chunks are compressed by {level}; compressed as a whole, they can be read")
        shards = [
            Shard(key=chunk["filename"], samples=chunk["chunk_size"], local_bytes=chunk["chunk_bytes"])
            for chunk in chunks
        ]
        return shards, replace(self, config=config)

    def fetch(self, storage: Storage, shard: Shard, target: Path) -> None:
        """Download a chunk, and decompress it."""
        data = storage.get(shard.key)
        if name := self.config.get("compression"):
            try:
                from litdata.streaming.compression import _COMPRESSORS
            except ImportError as error:
                raise missing_package(error, "litdata") from error
            data = _COMPRESSORS[name].decompress(data)
        target.write_bytes(data)

    def reader(self, path: Path, shard: Shard) -> SampleReader:
        """Return a reader of its items."""
        try:
            from litdata.streaming.item_loader import PyTreeLoader
            from litdata.streaming.serializers import _get_serializers
            from litdata.utilities._pytree import treespec_loads
        except ImportError as error:
            raise missing_package(error, "litdata") from error
        loader = PyTreeLoader()
        config = {**self.config, "data_spec": treespec_loads(self.config["data_spec"])}
        loader.setup(config, [{"chunk_size": shard.samples}], _get_serializers(None))
        return _Items(FramedFile(path), loader)


class _Items:
    def __init__(self, items: FramedFile, loader: Any) -> None:
        self._items, self._loader = items, loader

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, number: int) -> Any:
        return self._loader.load_item_from_bytes(bytearray(self._items[number]), 0)  # torch wants it writable
