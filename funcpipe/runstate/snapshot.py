"""Snapshots of a run's small objects, with few requests however many workers there are.

In one snapshot, each folder of a generation is listed once and no object is read twice. Only heartbeats are ever
rewritten, so whatever else was read stays known. A missing object of a folder that was listed costs nothing.
"""

import re
import threading
from collections.abc import Mapping, Sequence

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

    It belongs on top of a storage that refuses damaged objects, so that none is kept.
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.watches = False
        self._lock = threading.Lock()
        self._lists: dict[str, Mapping[str, str]] = {}
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
        try:
            data = self._store.get(key, gate=gate)
        except KeyMissing:
            self._count(RequestCounts(gets=1, empty_gets=1))
            self._missing.add(key)
            raise
        self._count(RequestCounts(gets=1))
        known = self._fresh if folder is not None and folder[1] == _REWRITTEN else self._kept
        known[key] = data
        return data

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys that begin with `prefix`, asked for once in a snapshot."""
        folder = _FOLDER.match(prefix)
        if folder is None or folder[1] not in _LISTED:
            return tuple(self._listed(prefix))
        return tuple(sorted(key for key in self._listed(folder[0]) if key.startswith(prefix)))

    def etags(self, prefix: str) -> Mapping[str, str]:
        """Return the keys of heartbeats that begin with `prefix`, and their etags, asked for once in a snapshot."""
        folder = _FOLDER.match(prefix)
        if folder is None or folder[1] != _REWRITTEN:
            raise NotImplementedError("a snapshot tells only heartbeats apart by their etags")
        return {key: etag for key, etag in self._listed(folder[0]).items() if key.startswith(prefix)}

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

    def _listed(self, prefix: str) -> Mapping[str, str]:
        """Return the keys that begin with `prefix`, those of heartbeats with their etags."""
        with self._lock:
            if prefix not in self._lists:
                self._asked += RequestCounts(lists=1)
                rewritten = prefix.endswith(f"/{_REWRITTEN}/")
                found = self._store.etags(prefix) if rewritten else dict.fromkeys(self._store.list(prefix), "")
                self._lists[prefix] = found
            return self._lists[prefix]

    def _count(self, asked: RequestCounts) -> None:
        with self._lock:
            self._asked += asked
