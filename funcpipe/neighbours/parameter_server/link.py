"""A link of limited bandwidth that several transfers share: for machines that stand for others with slower networks."""

import threading
import time
from collections.abc import Callable

_QUANTA = 16


class SharedLink:
    """A delay of transfers, as on a link of `bytes_s` bytes a second that they share evenly.

    A transfer moves in small pieces, one after another, and so takes turns with those of other threads. Without
    `bytes_s` it delays nothing by itself.
    """

    def __init__(
        self,
        bytes_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_s = bytes_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_s = 0.0

    def transfer(self, size: int, own_bytes_s: float | None = None) -> None:
        """Return once `size` bytes would have passed, over this link and over the other end's, of `own_bytes_s`."""
        if self._bytes_s is None and own_bytes_s is None:
            return
        piece, passed_s = size / _QUANTA, self._clock()
        for _ in range(_QUANTA):
            alone_s = passed_s + (piece / own_bytes_s if own_bytes_s else 0.0)
            passed_s = max(alone_s, self._reserve(piece, passed_s))
            self._sleep(max(passed_s - self._clock(), 0.0))

    def _reserve(self, size: float, now_s: float) -> float:
        """Return when the link will have moved the next `size` bytes."""
        if self._bytes_s is None:
            return now_s
        with self._lock:
            self._free_s = max(self._free_s, now_s) + size / self._bytes_s
            return self._free_s
