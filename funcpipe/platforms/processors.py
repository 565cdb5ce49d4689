"""The number of processors that this process may use, on every system."""

import os
import sys


def usable_processors() -> int:
    """Those that this process is bound to, on Linux; elsewhere, where that cannot be asked, all of the machine."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
