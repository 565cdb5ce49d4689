"""Snapshots of a run's small objects, with few requests however many workers there are.

In one snapshot, each folder of a generation is listed once and no object is read twice. Only heartbeats are ever
rewritten, so whatever else was read stays known. A missing object of a folder that was listed costs nothing.
"""

import re
from collections.abc import Sequence

from funcpipe.core import RequestCounts
from funcpipe.errors import KeyMissing
from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.platforms.wrappers import StorageWrapper

_FOLDER = re.compile(r"[a-z0-9-]+/g\d{4}(?:-[0-9a-f]+)?/([a-z-]+)/", re.ASCII)

_LISTED = ("functions", "heartbeats", "leases", "reports", "progress", "validations", "losses", "steps")
"""Folders with few and small objects each, of which a snapshot needs many."""

_REWRITTEN = "heartbeats"


class Snapshot(StorageWrapper):
    """A storage to read from only, which answers from what it has read since the last `renew`.

    It belongs on top of a storage that refuses damaged objects, so that none is kept. Only one thread may use it.
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.watches = False
        self._lists: dict[str, tuple[str, ...]] = {}
        self._kept: dict[str, bytes] = {}
        self._fresh: dict[str, bytes] = {}
        self._missing: set[str] = set()
        self._asked = RequestCounts()

    @property
    def asked(self) -> RequestCounts:
        """The requests that were made, all snapshots together."""
        return self._asked

    def renew(self) -> None:
        """Begin another snapshot."""
        self._lists.clear()
        self._fresh.clear()
        self._missing.clear()

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """Return a whole object, as the wrapped storage has it, or had it when it was read; raises KeyMissing."""
        if start or stop is not None:
            raise NotImplementedError("a snapshot holds whole objects only")
        folder = _FOLDER.match(key)
        if key in self._kept:
            return self._kept[key]
        if key in self._fresh:
            return self._fresh[key]
        unlisted = folder is not None and folder[1] in _LISTED and key not in self._listed(folder[0])
        if unlisted or key in self._missing:
            raise KeyMissing(key)
        self._asked += RequestCounts(gets=1)
        try:
            data = self._store.get(key, gate=gate)
        except KeyMissing:
            self._asked += RequestCounts(empty_gets=1)
            self._missing.add(key)
            raise
        known = self._fresh if folder is not None and folder[1] == _REWRITTEN else self._kept
        known[key] = data
        return data

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys that begin with `prefix`, asked for once in a snapshot."""
        folder = _FOLDER.match(prefix)
        if folder is None or folder[1] not in _LISTED:
            return self._listed(prefix)
        return tuple(key for key in self._listed(folder[0]) if key.startswith(prefix))

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Refuse: a snapshot writes nothing."""
        raise PermissionError(f"{key} is only looked at")

    def delete(self, key: str) -> None:
        """Refuse."""
        raise PermissionError(f"{key} is only looked at")

    def delete_many(self, keys: Sequence[str]) -> None:
        """Refuse."""
        raise PermissionError(f"{len(keys)} objects are only looked at")

    def touch(self, key: str) -> None:
        """Refuse."""
        raise PermissionError(f"{key} is only looked at")

    def _listed(self, prefix: str) -> tuple[str, ...]:
        if prefix not in self._lists:
            self._asked += RequestCounts(lists=1)
            self._lists[prefix] = self._store.list(prefix)
        return self._lists[prefix]
