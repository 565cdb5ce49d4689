"""Counts the storage requests of one process, whichever of its storages makes them."""

import threading

from funcpipe.core import CountsByKind, RequestCounts
from funcpipe.core.stores import DEFAULT


class RequestMeter:
    """Several storages may count with one meter, and several threads at once: all that a function or a client asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = CountsByKind().by_kind

    @property
    def by_kind(self) -> CountsByKind:
        """The counts so far, by the kind of objects."""
        with self._lock:
            return CountsByKind(**self._counts)

    @property
    def counts(self) -> RequestCounts:
        """The counts so far."""
        return self.by_kind.total

    def add(self, counts: RequestCounts, kind: str = DEFAULT) -> None:
        """Count what was asked of the store of objects of that kind."""
        with self._lock:
            self._counts[kind] += counts
