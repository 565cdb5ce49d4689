"""Leases: which function is a worker. Each attempt has a lease, taken by a put that only one function succeeds with.

The lease with the highest attempt number counts. A successor takes the next number, and thereby fences off the function
before, whether that is dead, asleep or just slow: what that one still writes is refused (`FencedStorage`).

An attempt that ends for good puts the next number itself, as an entry that says how it ended. So either it has a
successor, and what it says of its end does not count; or its word is final, and it can have no successor:

    00000000 lease   00000001 lease   00000002 ended: finished

An entry that is damaged counts as a lease: at worst a worker that has ended does its last steps again.
"""

import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from funcpipe.core import Halt, LeaseDocument, Outcome, RequestCounts
from funcpipe.core.settings import WHY_GONE
from funcpipe.errors import CorruptMessage, KeyExists, KeyMissing, Superseded
from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.platforms.wrappers import StorageWrapper
from funcpipe.runstate.documents import (
    exists,
    find_readable_document,
    get_listed_document,
    put_document,
    readable_documents,
    side_by_side,
)
from funcpipe.runstate.keys import Keys, newest_attempts

_log = logging.getLogger(__name__)


CLOSING = RequestCounts(puts=1, gets=2, empty_gets=1)
"""The storage requests of `Lease.close`: is there a successor, is this lease still here, and the last entry."""


class Fence(ABC):
    """A right to write and delete, which another may take away; `taken` once it was had."""

    def __init__(self, *, fresh_s: float, clock: Callable[[], float]) -> None:
        """`check` asks the storage only if it was not asked within the last `fresh_s` seconds."""
        self._fresh_s = fresh_s
        self._clock = clock
        self._checked_s = -float("inf")
        self._loss: Superseded | None = None
        self.taken = False

    @property
    def lost(self) -> bool:
        """True if it is known to be gone."""
        return self._loss is not None

    def check(self) -> None:
        """Raise Superseded if the right is lost, by what was last known of it if that is recent enough."""
        if self.lost or self._clock() - self._checked_s > self._fresh_s:
            self.check_now()

    @abstractmethod
    def check_now(self) -> None:
        """Ask the storage, and raise Superseded if the right is lost."""

    def _lose(self, cause: str, *, missing: bool = False) -> NoReturn:
        _log.warning("lost the lease: %s", cause)
        self._loss = Superseded(cause, missing=missing)
        raise self._loss

    def _check_not_lost(self) -> None:
        """Raise Superseded, as when the right was lost, if it is known to be."""
        if self._loss is not None:
            raise Superseded(str(self._loss), missing=self._loss.missing)


class Lease(Fence):
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
        super().__init__(fresh_s=fresh_s, clock=clock)
        self._storage = storage
        self._keys = keys
        self._worker = worker
        self._attempt = attempt
        self._holder = secrets.token_hex(8)
        self._lock = threading.Lock()

    def take(self) -> None:
        """Become the worker. Raises Superseded if another function is this attempt already, or a later one, or if the
        worker has ended for good.
        """
        if self._attempt and self._has_ended():
            self._lose(f"attempt {self._attempt - 2} of {self._worker} has ended it for good")
        if not self._put(self._attempt, LeaseDocument(holder=self._holder)):
            self._lose(f"another function is attempt {self._attempt} of {self._worker}")
        self.check_now()
        self.taken = True
        _log.info("took the lease")

    def close(self, ended: Outcome) -> None:
        """End the worker for good: nothing can succeed this attempt. Raises Superseded if a successor has begun."""
        self.check_now()
        if not self._put(self._attempt + 1, LeaseDocument(holder=self._holder, ended=ended)):
            self._lose(f"attempt {self._attempt + 1} of {self._worker} has begun")

    def signed(self, halt: Halt) -> Halt:
        """Return `halt` in the name of this attempt."""
        return replace(halt, worker=self._worker, attempt=self._attempt)

    def check_now(self) -> None:
        """Ask the storage, and raise Superseded if the lease is lost."""
        with self._lock:
            self._check_not_lost()
            asked_s = self._clock()
            if exists(self._storage, self._keys.lease(self._worker, self._attempt + 1)):
                self._lose(f"attempt {self._attempt + 1} of {self._worker} has begun")
            self._check_own()
            self._checked_s = asked_s

    def _check_own(self) -> None:
        """Raise Superseded if this attempt has another function, or none any more."""
        try:
            own = get_listed_document(self._storage, LeaseDocument, self._keys.lease(self._worker, self._attempt))
        except KeyMissing:
            self._lose(f"the lease of attempt {self._attempt} of {self._worker} is missing: {WHY_GONE}", missing=True)
        except CorruptMessage as error:
            if not self.taken:
                raise
            _log.warning("holds a lease that cannot be read any more: %s", error)
            return
        if own.holder != self._holder:
            self._lose(f"another function is attempt {self._attempt} of {self._worker}")

    def _put(self, number: int, entry: LeaseDocument) -> bool:
        """Put an entry of the worker's leases, unless there is one of that number."""
        try:
            put_document(self._storage, self._keys.lease(self._worker, number), entry, if_absent=True)
        except KeyExists:
            return False
        return True

    def _has_ended(self) -> bool:
        """Return True if the entry before this attempt's says that the worker has ended."""
        key = self._keys.lease(self._worker, self._attempt - 1)
        before = find_readable_document(self._storage, LeaseDocument, key)
        return before is not None and before.ended is not None


class FencedStorage(StorageWrapper):
    """A storage that writes and deletes only behind `fence`: Superseded is raised once the right to it is lost."""

    def __init__(self, storage: Storage, fence: Fence) -> None:
        super().__init__(storage)
        self._fence = fence

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object, behind the fence."""
        self._fence.check()
        super().put(key, data, if_absent=if_absent, gate=gate)

    def delete(self, key: str) -> None:
        """Remove an object, behind the fence."""
        self._fence.check()
        super().delete(key)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, behind the fence."""
        self._fence.check()
        super().delete_many(keys)

    def touch(self, key: str) -> None:
        """Make an object young, behind the fence."""
        self._fence.check()
        super().touch(key)


@dataclass(frozen=True, slots=True)
class LastAttempt:
    """The newest attempt of a worker that has had its lease, and how it has ended the worker, if it has."""

    attempt: int
    ended: Outcome | None


def last_attempt(storage: Storage, keys: Keys, worker: str) -> LastAttempt | None:
    """Return the newest attempt of `worker` that has had its lease; None if there was none."""
    newest = newest_attempt(storage, keys, worker)
    return None if newest is None else _as_it_ended(storage, keys, worker, newest)


def last_attempts(
    storage: Storage, keys: Keys, workers: Sequence[str], *, begun: Mapping[str, int] | None = None
) -> dict[str, LastAttempt | None]:
    """Return the newest attempt of each of `workers` that has had its lease, by one listing of all leases.

    Attempts that are known to have `begun`, as they have sent a heartbeat, hold a lease, which is not read.
    """
    newest, known = newest_attempts(storage.list(keys.all_leases), keys.all_leases), begun or {}

    def read(worker: str) -> LastAttempt | None:
        if worker not in newest:
            return None
        attempt, _ = newest[worker]
        has_begun = known.get(worker, -1) >= attempt
        return LastAttempt(attempt, None) if has_begun else _as_it_ended(storage, keys, worker, attempt)

    return dict(zip(workers, side_by_side(read, workers), strict=True))


def _as_it_ended(storage: Storage, keys: Keys, worker: str, newest: int) -> LastAttempt:
    """Return the last attempt of a worker by the entry of the number `newest` among its leases."""
    entry = next(readable_documents(storage, LeaseDocument, [keys.lease(worker, newest)]), None)
    return LastAttempt(newest, None) if entry is None or entry.ended is None else LastAttempt(newest - 1, entry.ended)


def newest_attempt(storage: Storage, keys: Keys, worker: str) -> int | None:
    """Return the number of the newest entry among the leases of `worker`; None if there is none."""
    numbers = [key.rpartition("/")[2] for key in storage.list(keys.leases(worker))]
    return max((int(number) for number in numbers if number.isdecimal()), default=None)


def is_superseded(storage: Storage, keys: Keys, worker: str, attempt: int) -> bool:
    """Return True if `attempt` of `worker` has a successor."""
    last = last_attempt(storage, keys, worker)
    return last is not None and last.attempt > attempt
