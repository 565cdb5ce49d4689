"""Memory for large tensors apart from the allocator's: given back when the tensor goes, whatever else is alive."""

import mmap

import torch
from torch import Tensor

_LEAST_BYTES = 1 << 20


def block(size: int) -> Tensor:
    """`size` uninitialised bytes; shape (size,), dtype uint8."""
    if size < _LEAST_BYTES:
        return torch.empty(size, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
