"""Storage that deletes objects by their age, as a bucket with a lifecycle rule does, by a clock that tests advance."""

import threading

from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.platforms.wrappers import StorageWrapper


class AgeingStorage(StorageWrapper):
    """`store`, in which objects expire `keep_days` days after they were written or touched; `day` is the clock.

    `expired` are the keys of all that has expired.
    """

    def __init__(self, store: Storage, *, keep_days: int) -> None:
        super().__init__(store)
        self.keep_days = keep_days
        self._written: dict[str, int] = {}
        self._lock = threading.Lock()
        self.day = 0
        self.expired: list[str] = []

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object, which is as old as the day is."""
        super().put(key, data, if_absent=if_absent, gate=gate)
        self._note(key)

    def touch(self, key: str) -> None:
        """Make an object young; raises KeyMissing."""
        super().touch(key)
        self._note(key)

    def pass_to(self, day: int) -> None:
        """Let time pass: what is too old by then is deleted."""
        with self._lock:
            self.day = max(self.day, day)
            old = [key for key, written in self._written.items() if self.day - written >= self.keep_days]
            for key in old:
                del self._written[key]
        there = sorted(set(old).intersection(self._store.list("")))
        self._store.delete_many(there)
        self.expired += there

    def _note(self, key: str) -> None:
        with self._lock:
            self._written[key] = self.day
