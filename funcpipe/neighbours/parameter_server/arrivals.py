"""Waiting for objects that come one after another, each under a key of its own."""

import threading
import time
from collections.abc import Callable

from funcpipe.comm.arrival_estimator import ArrivalEstimator, Due, Expectation
from funcpipe.errors import CorruptMessage, KeyMissing
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import READS


class Arrivals:
    """A wait for each object. A `storage` that cannot watch is polled at the times by which earlier ones came.

    Setting `cancel` ends the wait, after one more read.
    """

    def __init__(
        self, storage: Storage, cancel: threading.Event, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._storage, self._cancel, self._clock = storage, cancel, clock
        self._estimator = ArrivalEstimator(deadline_s=float("inf"))
        self._expected = Expectation(self._estimator)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The object `key`, or None if it is not there after `timeout_s`.

        Raises CorruptMessage if it stays damaged when it is read again.
        """
        began_s = self._clock()
        starts_s = (began_s,)
        due = self._expected.due(starts_s)
        paused = not self._storage.watches and due.due_s > 0
        if paused:
            self._pause(key, began_s, timeout_s, due)
        empty_s, trip_s, damaged = None, 0.0, 0
        while True:
            asked_s = self._clock()
            is_last = self._cancel.is_set() or asked_s - began_s >= timeout_s
            try:
                data = self._storage.get(key)
            except KeyMissing:
                if is_last:
                    return None
                empty_s, trip_s = asked_s, self._clock() - asked_s
                self._pause(key, began_s, timeout_s, due, trip_s)
            except CorruptMessage:
                damaged += 1
                if damaged == READS:
                    raise
            else:
                if paused or empty_s is not None:
                    self._expected.learn(starts_s, empty_s, asked_s, trip_s)
                return data

    def _pause(self, key: str, began_s: float, timeout_s: float, due: Due, trip_s: float = 0.0) -> None:
        since_s = self._clock() - began_s
        left_s = max(timeout_s - since_s, 0.0)
        learned_s = self._estimator.pause_s(since_s, due.due_s, due.spread_s, trip_s)
        self._storage.wait(key, left_s if self._storage.watches else min(learned_s, left_s), self._cancel)
