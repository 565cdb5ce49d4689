"""Leases: which function is a worker. Each attempt has a lease, taken by a put that only one function succeeds with.

The lease with the highest attempt number counts. A successor takes the next number, and thereby fences off the function
before, whether that is dead, asleep or just slow: what that one still writes is refused (`FencedStorage`).
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from funcpipe.core import LeaseDocument
from funcpipe.errors import KeyExists, KeyMissing, Superseded
from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.runstate.documents import get_document, put_document
from funcpipe.runstate.keys import Keys

_log = logging.getLogger(__name__)


class Lease:
    """The right of one function to be attempt `attempt` of `worker`. It is not held until `take` returns."""

    def __init__(
        self,
        storage: Storage,
        keys: Keys,
        worker: str,
        attempt: int,
        *,
        fresh_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`check` asks the storage only if it was not asked within the last `fresh_s` seconds."""
        self._storage = storage
        self._keys = keys
        self._worker = worker
        self._attempt = attempt
        self._fresh_s = fresh_s
        self._clock = clock
        self._holder = secrets.token_hex(8)
        self._checked_s = -float("inf")
        self._lock = threading.Lock()
        self.lost = False

    def take(self) -> None:
        """Become the worker. Raises Superseded if another function is this attempt already, or a later one."""
        lease = LeaseDocument(holder=self._holder)
        try:
            put_document(self._storage, self._keys.lease(self._worker, self._attempt), lease, if_absent=True)
        except KeyExists:
            self._lose(f"another function is attempt {self._attempt} of {self._worker}")
        self.check_now()
        _log.info("took the lease")

    def check(self) -> None:
        """Raise Superseded if the lease is lost, by what was last known of it if that is recent enough."""
        if self.lost or self._clock() - self._checked_s > self._fresh_s:
            self.check_now()

    def check_now(self) -> None:
        """Ask the storage, and raise Superseded if the lease is lost."""
        with self._lock:
            if self.lost:
                self._lose(f"attempt {self._attempt} of {self._worker} has been superseded")
            asked_s = self._clock()
            if self._exists(self._keys.lease(self._worker, self._attempt + 1)):
                self._lose(f"attempt {self._attempt + 1} of {self._worker} has begun")
            own = self._keys.lease(self._worker, self._attempt)
            try:
                holder = get_document(self._storage, LeaseDocument, own).holder
            except KeyMissing:
                self._lose(f"the lease of attempt {self._attempt} of {self._worker} has been taken away")
            if holder != self._holder:
                self._lose(f"another function is attempt {self._attempt} of {self._worker}")
            self._checked_s = asked_s

    def _exists(self, key: str) -> bool:
        try:
            self._storage.get(key, stop=1)
        except KeyMissing:
            return False
        return True

    def _lose(self, cause: str) -> NoReturn:
        if not self.lost:
            _log.warning("lost the lease: %s", cause)
        self.lost = True
        raise Superseded(cause)


class FencedStorage:
    """A storage that writes and deletes only while `lease` is held."""

    def __init__(self, storage: Storage, lease: Lease) -> None:
        self._storage = storage
        self._lease = lease
        self.watches = storage.watches

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """As the wrapped storage; raises Superseded once the lease is lost."""
        self._lease.check()
        self._storage.put(key, data, if_absent=if_absent, gate=gate)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """As the wrapped storage."""
        return self._storage.get(key, start=start, stop=stop, gate=gate)

    def delete(self, key: str) -> None:
        """As the wrapped storage; raises Superseded once the lease is lost."""
        self._lease.check()
        self._storage.delete(key)

    def list(self, prefix: str) -> tuple[str, ...]:
        """As the wrapped storage."""
        return self._storage.list(prefix)

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """As the wrapped storage."""
        self._storage.wait(key, timeout_s, cancel)


def newest_attempt(storage: Storage, keys: Keys, worker: str) -> int | None:
    """The attempt number of the newest lease of `worker`; None if there is none."""
    numbers = [key.rpartition("/")[2] for key in storage.list(keys.leases(worker))]
    return max((int(number) for number in numbers if number.isdecimal()), default=None)
