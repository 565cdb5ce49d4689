"""A gate through which bodies pass one at a time.

Requests may wait for their latency side by side, but bodies that share a link fairly all end late together, and what
waits for the first of them waits longest: one at a time, each is complete as early as it can be.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from funcpipe.platforms.base import Gate

_Number = tuple[bool, int]


class TransferGate:
    """TransferGate are taken in the order in which they were reserved, or else of arrival at the gate; some go ahead.

    It is itself a gate: one for those that did not reserve.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._drawn = 0
        self._pending: set[_Number] = set()
        self._moving: _Number | None = None

    @contextmanager
    def reserve(self, *, ahead: bool = False) -> Iterator[Gate]:
        """Reserve the next turn, or the next of those that go `ahead` of all others; yields the gate for it.

        It is given up when the context ends.
        """
        number = self._draw(ahead)
        try:
            yield _Turn(self, number)
        finally:
            self._leave(number)

    def enter(self, number: _Number) -> None:
        """Wait until it is the turn of `number`."""
        with self._changed:
            self._pending.add(number)
            self._changed.wait_for(lambda: self._moving is None and min(self._pending) == number)
            self._moving = number

    def leave(self) -> None:
        """End the turn of whoever has it."""
        with self._changed:
            assert self._moving is not None, "nobody has the turn"
            self._leave(self._moving)

    def __enter__(self) -> None:
        self.enter(self._draw())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _draw(self, ahead: bool = False) -> _Number:
        with self._changed:
            self._drawn += 1
            number = (not ahead, self._drawn)
            self._pending.add(number)
            return number

    def _leave(self, number: _Number) -> None:
        with self._changed:
            self._pending.discard(number)
            if self._moving == number:
                self._moving = None
            self._changed.notify_all()


class _Turn:
    def __init__(self, turns: TransferGate, number: _Number) -> None:
        self._turns = turns
        self._number = number

    def __enter__(self) -> None:
        self._turns.enter(self._number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.leave()
