"""Storage that does something more: wrapped around any back-end."""

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from funcpipe.errors import KeyExists, KeyMissing, StorageBusy
from funcpipe.platforms.base import OPEN, Gate, Storage

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
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
        self._traffic = RequestCounts()
        self.watches = store.watches

    @property
    def traffic(self) -> RequestCounts:
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


class Retried:
    """Makes a request again, after a pause, when the storage is busy: at most `attempts` times in all.

    Pauses are drawn between nothing and twice as much each time, so that functions which were refused together do not
    come back together.
    """

    def __init__(
        self,
        store: Storage,
        *,
        attempts: int = 8,
        first_s: float = 0.05,
        most_s: float = 5.0,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._attempts = attempts
        self._first_s = first_s
        self._most_s = most_s
        self._sleep = sleep
        self._draw = draw
        self.watches = store.watches

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """As the wrapped storage. A put refused after a failure, as these very bytes are there, has succeeded."""
        tries = 0

        def put() -> None:
            nonlocal tries
            tries += 1
            try:
                self._store.put(key, data, if_absent=if_absent, gate=gate)
            except KeyExists:
                if tries == 1 or self._store.get(key) != data:
                    raise

        self._repeat(put)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """As the wrapped storage."""
        return self._repeat(lambda: self._store.get(key, start=start, stop=stop, gate=gate))

    def delete(self, key: str) -> None:
        """As the wrapped storage."""
        self._repeat(lambda: self._store.delete(key))

    def list(self, prefix: str) -> tuple[str, ...]:
        """As the wrapped storage."""
        return self._repeat(lambda: self._store.list(prefix))

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """As the wrapped storage."""
        self._store.wait(key, timeout_s, cancel)

    def _repeat(self, request: Callable[[], _Result]) -> _Result:
        for attempt in range(self._attempts - 1):
            try:
                return request()
            except StorageBusy as error:
                pause_s = self._draw() * min(self._first_s * 2**attempt, self._most_s)
                _log.info("retry %d of %d in %.2f s: %s", attempt + 1, self._attempts - 1, pause_s, error)
                self._sleep(pause_s)
        return request()
