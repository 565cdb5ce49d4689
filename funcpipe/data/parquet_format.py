"""Parquet files, read by row groups and columns, as samples of Hugging Face datasets."""

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funcpipe.data.shard_format import SampleReader, Shard, missing_package
from funcpipe.errors import DataError
from funcpipe.platforms.base import Storage

_END_BYTES = 1 << 16
"""Bytes of a file's end that are read first: in most files, all of its footer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFormat:
    """Parquet, of whose columns `columns` are read, by default all. A shard is a row group, kept as an Arrow file."""

    columns: tuple[str, ...] | None = None
    output: str | None = "torch"

    def index(self, storage: Storage, url: str) -> tuple[Sequence[Shard], "ParquetFormat"]:
        """The row groups of all files below the URL, by the files' footers, in the order of the files' names."""
        keys = [key for key in storage.list("") if key.endswith(".parquet")]
        if not keys:
            raise DataError(f"{url}: there are no files whose names end in .parquet")
        shards: list[Shard] = []
        for key in keys:
            footer = _footer(storage, key, _END_BYTES)  # type: ignore[arg-type]  # storages compare by identity
            self._check_columns(f"{url}: {key}", footer.schema.to_arrow_schema().names)
            groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
            end_bytes = str(footer.serialized_size + 8)
            shards += [
                Shard(key=key, part=number, samples=group.num_rows, local_bytes=self._bytes_of(group), note=end_bytes)
                for number, group in enumerate(groups)
            ]
        return shards, self

    def fetch(self, storage: Storage, shard: Shard, target: Path) -> None:
        """Read the columns of a row group, and write them as a stream of Arrow."""
        import pyarrow

        with _opened(storage, shard) as file:
            table = file.read_row_group(shard.part, columns=None if self.columns is None else list(self.columns))
        with pyarrow.OSFile(str(target), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)

    def reader(self, path: Path, shard: Shard) -> SampleReader:
        """Its rows, as a Hugging Face dataset that reads the file."""
        try:
            from datasets import Dataset
        except ImportError as error:
            raise missing_package(error, "parquet") from error
        rows = Dataset.from_file(str(path))
        return rows if self.output is None else rows.with_format(self.output)  # type: ignore[no-any-return]

    def _check_columns(self, place: str, names: Sequence[str]) -> None:
        missing = [name for name in self.columns or () if name not in names]
        if missing:
            raise DataError(f"{place} has no column {missing[0]!r}; it has {', '.join(names)}")

    def _bytes_of(self, group: Any) -> int:
        chunks = [group.column(number) for number in range(group.num_columns)]
        wanted = [c for c in chunks if self.columns is None or c.path_in_schema.split(".")[0] in self.columns]
        return sum(int(chunk.total_uncompressed_size) for chunk in wanted)


def _opened(storage: Storage, shard: Shard) -> Any:
    """The Parquet file of a shard, of which only what is asked for is read: its end, and columns of row groups."""
    from pyarrow.parquet import ParquetFile

    metadata = _footer(storage, shard.key, int(shard.note))  # type: ignore[arg-type]
    return ParquetFile(_StoredFile(storage, shard.key, metadata), metadata=metadata, pre_buffer=True)


@functools.lru_cache(maxsize=8)
def _footer(storage: Storage, key: str, end_bytes: int) -> Any:
    """The metadata at the end of a file, likely in its last `end_bytes`; those of the last few files are kept."""
    try:
        from pyarrow import ArrowInvalid, BufferReader
        from pyarrow.parquet import read_metadata
    except ImportError as error:
        raise missing_package(error, "parquet") from error

    end = storage.get(key, start=-end_bytes)
    footer_bytes = int.from_bytes(end[-8:-4], "little") + 8
    if footer_bytes > len(end):
        end = storage.get(key, start=-footer_bytes)
    try:
        return read_metadata(BufferReader(end))
    except ArrowInvalid as error:
        raise DataError(f"{key} is not a Parquet file: {error}") from error


class _StoredFile(io.RawIOBase):
    """A Parquet file in storage, without its footer: each read is a request for a range of its bytes."""

    def __init__(self, storage: Storage, key: str, metadata: Any) -> None:
        self._storage, self._key, self._place = storage, key, 0
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
        self._size = max((_first_byte(chunk) + chunk.total_compressed_size for chunk in chunks), default=0)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True: reading can begin anywhere."""
        return True

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Let the next read begin there."""
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        """The next `size` bytes, or all that are left."""
        stop = self._size if size is None or size < 0 else min(self._place + size, self._size)
        data = self._storage.get(self._key, start=self._place, stop=stop) if stop > self._place else b""
        self._place += len(data)
        return data


def _first_byte(chunk: Any) -> int:
    dictionary = chunk.dictionary_page_offset
    return int(chunk.data_page_offset if dictionary is None else min(dictionary, chunk.data_page_offset))
