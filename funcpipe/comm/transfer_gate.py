"""A gate that lets one transfer's bytes through at a time.

Requests may wait for their latency side by side. But bodies that share a link all end late together, and the task that
waits for the first of them waits longest; one after the other, each is complete as early as it can be.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from funcpipe.platforms.base import Gate

_Number = tuple[bool, int]
"""False for transfers that go ahead, then the order of asking; the smallest number passes first."""


class TransferGate:
    """Numbers transfers and lets them pass one at a time, in the order of their numbers.

    A transfer with a *reservation* is waited for by those after it; one with a *ticket* is not until it is at the gate.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._drawn = 0
        self._pending: set[_Number] = set()
        self._passing: _Number | None = None

    @contextmanager
    def reserve(self, *, ahead: bool = False) -> Iterator[Gate]:
        """Yield the gate for the next number, or the next of those that go `ahead` of all others.

        Later numbers wait for it until the context ends.
        """
        with self._changed:
            number = self._draw(ahead)
            self._pending.add(number)
        try:
            yield _NumberedGate(self, number)
        finally:
            self._give_up(number)

    def ticket(self) -> Gate:
        """Return the gate for the next number, which holds up no other until it is entered."""
        return _NumberedGate(self, self._draw(False))

    def enter(self, number: _Number) -> None:
        """Wait for the turn of `number`."""
        with self._changed:
            self._pending.add(number)
            self._changed.wait_for(lambda: self._passing is None and min(self._pending) == number)
            self._passing = number

    def leave(self) -> None:
        """End the current turn."""
        with self._changed:
            assert self._passing is not None, "nothing passes the gate"
            self._give_up(self._passing)

    def _draw(self, ahead: bool) -> _Number:
        with self._changed:
            self._drawn += 1
            return (not ahead, self._drawn)

    def _give_up(self, number: _Number) -> None:
        with self._changed:
            self._pending.discard(number)
            if self._passing == number:
                self._passing = None
            self._changed.notify_all()


class _NumberedGate:
    def __init__(self, gate: TransferGate, number: _Number) -> None:
        self._gate = gate
        self._number = number

    def __enter__(self) -> None:
        self._gate.enter(self._number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.leave()
