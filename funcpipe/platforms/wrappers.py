"""Storage that does something more: wrapped around any back-end."""

import threading
from dataclasses import dataclass, replace

from funcpipe.errors import KeyMissing
from funcpipe.platforms.base import OPEN, Gate, Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests and bytes. `empty_gets`, among the gets, found no object."""

    puts: int = 0
    gets: int = 0
    empty_gets: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Counted:
    """Counts the requests and bytes that pass through it."""

    def __init__(self, store: Storage) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._traffic = Traffic()
        self.watches = store.watches

    @property
    def traffic(self) -> Traffic:
        """The counts so far."""
        return self._traffic

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """As the wrapped storage; counted."""
        self._store.put(key, data, if_absent=if_absent, gate=gate)
        with self._lock:
            count = self._traffic
            size = memoryview(data).nbytes
            self._traffic = replace(count, puts=count.puts + 1, sent_bytes=count.sent_bytes + size)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """As the wrapped storage; counted, also when there is no object."""
        try:
            data = self._store.get(key, start=start, stop=stop, gate=gate)
        except KeyMissing:
            with self._lock:
                count = self._traffic
                self._traffic = replace(count, gets=count.gets + 1, empty_gets=count.empty_gets + 1)
            raise
        with self._lock:
            count = self._traffic
            self._traffic = replace(count, gets=count.gets + 1, received_bytes=count.received_bytes + len(data))
        return data

    def delete(self, key: str) -> None:
        """As the wrapped storage; free of charge everywhere, not counted."""
        self._store.delete(key)

    def list(self, prefix: str) -> tuple[str, ...]:
        """As the wrapped storage; a run never lists while it trains."""
        return self._store.list(prefix)

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """As the wrapped storage."""
        self._store.wait(key, timeout_s, cancel)
