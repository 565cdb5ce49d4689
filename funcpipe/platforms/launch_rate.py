"""How fast a platform lets functions start: a burst at once, and then so many a second."""

import math
import time
from collections.abc import Callable

from funcpipe.core import PlatformSpec

_PERIOD_S = 10.0


class LaunchRate:
    """The launch rate of a platform: `take` waits until so many more functions may start.

    As on AWS, what starts is made up for evenly, so that as many may start again 10 seconds later.
    """

    def __init__(
        self,
        spec: PlatformSpec | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._most = math.inf if spec is None or spec.launches_10s is None else float(spec.launches_10s)
        self._per_s = self._most / _PERIOD_S
        self._clock, self._sleep = clock, sleep
        self._left, self._at_s = self._most, clock()

    def take(self, functions: int) -> None:
        """Wait until `functions` more may start."""
        if math.isinf(self._most):
            return
        wanted = min(functions, self._most)
        while True:
            now_s = self._clock()
            self._left, self._at_s = min(self._left + (now_s - self._at_s) * self._per_s, self._most), now_s
            if self._left >= wanted - 1e-6:
                self._left -= functions
                return
            self._sleep((wanted - self._left) / self._per_s)


def launched_after_s(functions: int, spec: PlatformSpec) -> tuple[float, float]:
    """Return the seconds after which the last of so many functions starts, and the mean over all of them.

    The first `launches_10s` start at once, each further one 10 / launches_10s seconds after the one before.
    """
    if spec.launches_10s is None:
        return 0.0, 0.0
    late = max(functions - spec.launches_10s, 0)
    last_s = late * _PERIOD_S / spec.launches_10s
    return last_s, last_s * (late + 1) / (2 * functions)
