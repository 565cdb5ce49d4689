"""This process: the most memory that it has used, the allocator of its functions, what it may use of the machine.

What one tensor leaves must serve the next, and glibc cannot give it to another of the same size: torch asks for aligned
memory, and glibc then searches for a larger block. A network of many equal tensors needs 1.7 times the memory that it
uses. tcmalloc has few such holes (`experiments/studies/allocators.py` at f9edc59e): functions have it where it is
installed, and their images install it.
"""

import contextlib
import ctypes
import ctypes.util
import functools
import os
import resource
import sys
from collections.abc import Iterable
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


LIBRARY = "libtcmalloc_minimal.so.4"
PACKAGE = "libtcmalloc-minimal4"
"""The Debian package that installs the library."""

_PRELOAD = "LD_PRELOAD"
_SETTINGS = {"TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": str(1 << 62)}  # or it reports each tensor of a gigabyte
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc, malloc.h
_LARGEST_IN_HEAP = 32 << 20  # the most that glibc allows
_KEPT = 1 << 30


def environment() -> dict[str, str]:
    """Return the environment variables of this process, for one in which functions run: it allocates with tcmalloc.

    As this process does, where tcmalloc is not installed or something is preloaded already.
    """
    if _PRELOAD in os.environ or _installed() != LIBRARY:
        return dict(os.environ)
    return {**os.environ, **variables()}


def restart_process() -> None:
    """Begin this program again as one that allocates as functions do, if it does not; does not return then.

    It must have done nothing yet that must not be done twice.
    """
    wanted = environment()
    if wanted != dict(os.environ) and sys.executable:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)


def variables() -> dict[str, str]:
    """Return the environment variables with which a process allocates with tcmalloc, if it is installed."""
    return {_PRELOAD: LIBRARY, **_SETTINGS}


@functools.cache
def _installed() -> str | None:
    return ctypes.util.find_library("tcmalloc_minimal") if sys.platform == "linux" else None


def configure() -> None:
    """Set up glibc's allocator, should that be the function's: one heap for all threads, which keeps what is freed.

    By default glibc has a heap for each of the lanes, so that what one frees is of no use to another, and returns
    memory to the system only to ask for it again: a tenth of the time of a convolutional network. Does nothing
    where the C library is another.
    """
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return
    for option, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP), (_M_TRIM_THRESHOLD, _KEPT)):
        library.mallopt(option, value)


def trim() -> None:
    """Give back to the system what is free: a function has ended, and its environment waits for the next one.

    tcmalloc's C interface and glibc's malloc_trim(3) both do so for all that no object holds. Does nothing elsewhere.
    """
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "MallocExtension_ReleaseFreeMemory"):
        library.MallocExtension_ReleaseFreeMemory()
    elif hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def usable_processors() -> int:
    """Those that this process is bound to, on Linux; elsewhere, where that cannot be asked, all of the machine."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the limit of a container, by the versions of control groups."""


def usable_memory_bytes(limits: Iterable[str] = _MEMORY_LIMITS) -> int:
    """The memory of this machine, or of the container that this process is in, whose limit is in a file of `limits`."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in limits:
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says "max"
            found.append(int(Path(name).read_text()))
    return min(found)
