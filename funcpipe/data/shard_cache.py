"""Downloaded shards: files in the function's temporary folder, no more of them than fit."""

import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from funcpipe.data.shard_format import SampleReader, Shard, ShardFormat
from funcpipe.platforms.base import Storage


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
