"""The C allocator, set up for a function that trains."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc, malloc.h
_LARGEST_IN_HEAP = 32 << 20  # the most that glibc allows
_KEPT = 1 << 30


def settle() -> None:
    """Give all threads one heap, and keep in it what is freed, for the next micro-batch.

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
