"""Waiting for what other threads and processes do, however slow the machine is."""

import time
from collections.abc import Callable

LONG_S = 200.0
"""What has not come after so long will not come: no test is about time."""


def wait_until(happened: Callable[[], object]) -> None:
    """Ask again and again, often at first."""
    until_s, pause_s = time.monotonic() + LONG_S, 0.01
    while not happened():
        assert time.monotonic() < until_s
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.2)
