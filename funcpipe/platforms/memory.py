"""The most memory that this process has used: one figure, on every system."""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_KIB = 1024


def peak_memory_bytes() -> int:
    """The most memory that this process has used, in bytes.

    Linux tells it of this process alone (VmHWM). Elsewhere `getrusage` does, which after an `exec` still counts what
    the process was before; its unit is the byte on macOS and the KiB elsewhere (getrusage(2) of each).
    """
    if _STATUS.exists():
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * _KIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * _KIB
