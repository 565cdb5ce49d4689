"""A gate through which bodies pass one at a time, in the order in which they came to it.

Requests may wait for their latency side by side, but bodies that share a link fairly all end late together, and what
waits for the first of them waits longest: one at a time, each is complete as early as it can be.
"""

import threading
from collections import deque
from types import TracebackType


class Turns:
    """A lock that is granted in order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        turn.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False
