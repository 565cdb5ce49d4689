"""The interface of shard formats: list the shards, download one, and read its samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from funcpipe.core.distribution import install
from funcpipe.errors import DataError
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
    return DataError(f"{error.name} is not installed, which this data needs; run: {install(extra)}")
