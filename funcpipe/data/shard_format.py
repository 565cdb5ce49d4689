"""The interface of shard formats: list the shards, download one, read its samples; and what several of them share."""

import json
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from funcpipe.core.distribution import install_command
from funcpipe.errors import DataError, KeyMissing
from funcpipe.platforms.base import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One shard: its object below the dataset's URL, how many samples it holds, and its bytes in the local cache.

    `part` distinguishes shards of one object; `note` is for its format.
    """

    key: str
    samples: int
    local_bytes: int
    part: int = 0
    note: str = ""


class SampleReader(Protocol):
    """The samples of one downloaded shard, by their number in it."""

    def __len__(self) -> int:
        """The number of samples."""

    def __getitem__(self, number: int, /) -> Any:
        """The sample of that number."""


class ShardFormat(Protocol):
    """A format, and what its index says of all shards; it travels to functions, and needs its libraries only there."""

    def index(self, storage: Storage, url: str) -> tuple[Sequence[Shard], "ShardFormat"]:
        """The dataset's shards, and this format with what its index says; `url` is for messages. Raises DataError."""

    def fetch(self, storage: Storage, shard: Shard, target: Path) -> None:
        """Download a shard into the file `target`."""

    def reader(self, path: Path, shard: Shard) -> SampleReader:
        """Return a reader of the samples of a shard in the file `path`."""


def missing_package(error: ImportError, extra: str) -> DataError:
    """The error for a library that is not installed: how to install it."""
    return DataError(f"{error.name} is not installed, which this data needs; run: {install_command(extra)}")


INDEX = "index.json"


class FramedFile:
    """The framed items of a file of MosaicML Streaming or LitData: a count, offsets, then the items' bytes.

    ::

        uint32 items | uint32 offsets[items + 1] | item 0 | item 1 | …

    It is mapped into memory: it stays readable after the file has been removed.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (self._items,) = struct.unpack_from("<I", self._bytes)

    def __len__(self) -> int:
        return int(self._items)

    def __getitem__(self, number: int) -> bytes:
        begin, end = struct.unpack_from("<2I", self._bytes, 4 * (1 + number))
        return self._bytes[begin:end]


def load_index(storage: Storage, url: str, key: str, wanted: str) -> dict[str, Any]:
    """The JSON object `key` below `url`. Raises DataError, which says what was `wanted`, if it is not one."""
    try:
        found = json.loads(storage.get(key))
    except KeyMissing:
        raise DataError(f"{url}: there is no {key}; {wanted}") from None
    except ValueError as error:
        raise DataError(f"{url}: {key} is not JSON: {error}; {wanted}") from error
    if not isinstance(found, dict):
        raise DataError(f"{url}: {key} is a {type(found).__name__}, not an object; {wanted}")
    return found
