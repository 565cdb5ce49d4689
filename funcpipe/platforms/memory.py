"""The most memory that this process has used: one figure, on every system."""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # the peak is what is used now: proc(5), since Linux 4.0; a process may do it to itself
_KIB = 1024


def peak_memory_bytes() -> int:
    """Return the most memory that this process has used, in bytes.

    Linux reports it for this process alone (VmHWM). Elsewhere `getrusage` does, which after an `exec` still counts what
    the process was before; its unit is the byte on macOS and the KiB elsewhere (getrusage(2) of each).
    """
    if _STATUS.exists():
        return _from_linux("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * _KIB


class PeakMemory:
    """The most memory that this process has used since this was made: environments are used again for other functions.

    Where the system lets no process reset its figure, that counts once it has grown, and before that the most that was
    measured.
    """

    def __init__(self) -> None:
        self._before_bytes = self._seen_bytes = 0
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:
            self._before_bytes = peak_memory_bytes()

    def peak_bytes(self) -> int:
        """Return the most that was used, in bytes."""
        peak = peak_memory_bytes()
        if peak > self._before_bytes or not _STATUS.exists():
            return peak
        self._seen_bytes = max(self._seen_bytes, _from_linux("VmRSS"))
        return self._seen_bytes


def _from_linux(name: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[name].split()[0]) * _KIB
