"""The time of requests, and the bandwidth of bodies."""

import statistics
import time
from collections.abc import Callable
from functools import partial

REPEATS = 3
_PARTS = 4
_LONG_S = 0.3  # a transfer of this duration gives a reliable bandwidth


def bandwidth(move: Callable[[bytes], object], data: bytes, most: int) -> tuple[float, bytes]:
    """Bytes per second, from the times of a large body and a quarter of it; and that body, of at most `most` bytes.

    The small one gives the time of a request besides its bytes. Disturbances make it longer, so that the shortest
    of its times counts, of many: a longer one would make the bandwidth too large.
    """
    while seconds(partial(move, data)) < _LONG_S and 2 * len(data) <= most:
        data = data + data
    part = data[: len(data) // _PARTS]
    long_s = statistics.median(seconds(partial(move, data)) for _ in range(REPEATS))
    short_s = min(seconds(partial(move, part)) for _ in range(_PARTS * REPEATS))
    return (len(data) - len(part)) / max(long_s - short_s, 1e-9), data


def seconds(do: Callable[[], object]) -> float:
    """Return the seconds that `do` takes."""
    began_s = time.perf_counter()
    do()
    return time.perf_counter() - began_s
