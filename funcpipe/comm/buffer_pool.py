"""Memory for large tensors and messages, apart from torch's allocator.

Fresh memory costs more than the copy into it, because the system maps it page by page. So a *block* asks for huge
pages, which cost a third, and goes back to the system with its tensor, whatever else is alive; and a `BufferPool` keeps
the blocks of messages for the next messages.
"""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

LEAST_BLOCK_BYTES = 1 << 20
_LEAST_KEPT_BYTES = 64 * 1024  # smaller ones are not worth keeping


def block(size: int) -> Tensor:
    """Return `size` uninitialised bytes; shape (size,), dtype uint8."""
    if size < LEAST_BLOCK_BYTES:
        return torch.empty(size, dtype=torch.uint8)
    return torch.frombuffer(mapped(size), dtype=torch.uint8)


def mapped(size: int) -> mmap.mmap:
    """Return `size` bytes on pages of their own, huge ones if the system has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux only
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class BufferPool:
    """Lends buffers to several threads; keeps as many as were ever lent at once, preferring larger ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []

    @contextmanager
    def lend(self, size: int) -> Iterator[Tensor]:
        """A buffer of at least `size` bytes, for as long as the context lasts."""
        if size <= _LEAST_KEPT_BYTES:
            yield torch.empty(size, dtype=torch.uint8)
            return
        buffer = self._take(size)
        try:
            yield buffer
        finally:
            with self._lock:
                self._free.append(buffer)

    def _take(self, size: int) -> Tensor:
        with self._lock:
            self._free.sort(key=Tensor.numel)
            for position, buffer in enumerate(self._free):
                if buffer.numel() >= size:
                    return self._free.pop(position)
            if self._free:
                self._free.pop()  # make room for a larger one
        return block(size)
