"""Memory for messages, used again and again: the first touch of fresh memory costs more than the copy into it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from funcpipe.comm.blocks import block

_SMALL_BYTES = 64 * 1024  # not worth keeping


class BufferPool:
    """Lends buffers; keeps as many as were lent at once, each as large as it was ever needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []

    @contextmanager
    def lend(self, size: int) -> Iterator[Tensor]:
        """A buffer of at least `size` bytes, for as long as the context lasts."""
        if size <= _SMALL_BYTES:
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
                self._free.pop()  # a larger one takes its place
        return block(size)
