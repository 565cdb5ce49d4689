"""Objects in this process's memory: for tests, and for functions that are threads."""

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from funcpipe.errors import KeyExists, KeyMissing
from funcpipe.platforms.base import OPEN, Gate

_CANCEL_S = 0.1  # how often a wait looks whether it was cancelled


class MemoryStorage:
    """A dictionary behind a lock."""

    watches = True

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._put_counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._awaited: dict[str, threading.Condition] = {}  # by key, so that nobody wakes for an object of others

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object; with `if_absent`, raise KeyExists rather than replace one."""
        with gate:
            body = bytes(data)
        with self._lock:
            if if_absent and key in self._objects:
                raise KeyExists(key)
            self._objects[key] = body
            self._put_counts[key] += 1
            if key in self._awaited:
                self._awaited.pop(key).notify_all()

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """The bytes [start, stop) of an object; raises KeyMissing."""
        with self._lock:
            body = self._objects.get(key)
        if body is None:
            raise KeyMissing(key)
        with gate:
            return body[start:stop]

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is not an error."""
        with self._lock:
            self._objects.pop(key, None)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects; missing keys are not an error."""
        for key in keys:
            self.delete(key)

    def list(self, prefix: str) -> tuple[str, ...]:
        """The keys that begin with `prefix`, sorted."""
        with self._lock:
            return tuple(sorted(key for key in self._objects if key.startswith(prefix)))

    def etags(self, prefix: str) -> Mapping[str, str]:
        """Return the keys that begin with `prefix`, and how often something was put there."""
        return {key: str(self._put_counts[key]) for key in self.list(prefix)}

    def touch(self, key: str) -> None:
        """Nothing, as no object has an age here; raises KeyMissing."""
        with self._lock:
            if key not in self._objects:
                raise KeyMissing(key)

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause until the object is there, `timeout_s` are over or `cancel` is set."""
        ends_s = time.monotonic() + timeout_s
        with self._lock:
            while key not in self._objects and not cancel.is_set() and (left_s := ends_s - time.monotonic()) > 0:
                self._awaited.setdefault(key, threading.Condition(self._lock)).wait(min(left_s, _CANCEL_S))
