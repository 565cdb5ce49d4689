"""Counts the storage requests of one process, whichever of its storages makes them."""

import threading

from funcpipe.core import RequestCounts


class RequestMeter:
    """Several storages may count with one meter, and several threads at once: all that a function or a client asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = RequestCounts()

    @property
    def counts(self) -> RequestCounts:
        """The counts so far."""
        return self._counts

    def add(self, counts: RequestCounts) -> None:
        """Count what was asked."""
        with self._lock:
            self._counts += counts
