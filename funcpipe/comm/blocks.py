"""Memory for large tensors apart from the allocator's: given back when the tensor goes, whatever else is alive.

Fresh memory costs more than the copy into it, page by page; huge pages, where the system has them, cost a third.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_LEAST_BYTES = 1 << 20


def block(size: int) -> Tensor:
    """`size` uninitialised bytes; shape (size,), dtype uint8."""
    if size < _LEAST_BYTES:
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # not everywhere
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
