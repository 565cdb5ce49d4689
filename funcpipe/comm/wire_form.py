"""The form of a tensor on its way: its size in bytes, writing and reading.

Most tensors travel as the numbers of one dtype, which is cast if it is not their own. With `Wire.INT8`, 32-bit floats
travel as `int8x256`: the scale of each block of 256, then a byte for each number (`block_int8.py`). So 300 numbers take
2 * 4 + 300 = 308 bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from funcpipe.comm.block_int8 import blocks_in, quantise, restore
from funcpipe.core import Wire

_CAST_BYTES = 256 * 1024  # read and cast in chunks that fit the processor's cache
_WIRE_DTYPES = {Wire.BF16: torch.bfloat16, Wire.FP16: torch.float16}


class WireForm(Protocol):
    """A form in which tensors travel."""

    @property
    def name(self) -> str:
        """The name of the form in messages."""
        ...

    def size(self, count: int) -> int:
        """Return the bytes that `count` numbers take."""
        ...

    def fits(self, target: Tensor, dtype: torch.dtype) -> bool:
        """Return True if numbers that had `dtype` can be read into `target`."""
        ...

    def write(self, tensor: Tensor, place: Tensor) -> None:
        """Write `tensor`, which is not empty, to `place`, of dtype uint8 and just as long as it takes."""
        ...

    def read(self, data: memoryview, target: Tensor) -> None:
        """Set `target`, contiguous and not empty, to the numbers in `data`."""
        ...


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers one after another, as numbers of `dtype`."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name of the dtype."""
        return dtype_name(self.dtype)

    def size(self, count: int) -> int:
        """Return the bytes of so many numbers of `dtype`."""
        return count * self.dtype.itemsize

    def fits(self, target: Tensor, dtype: torch.dtype) -> bool:
        """Numbers are read as what they were, or as what they travelled in."""
        return target.dtype in (dtype, self.dtype)

    def write(self, tensor: Tensor, place: Tensor) -> None:
        """Copy `tensor`, in one pass with the cast."""
        if tensor.dtype is not self.dtype:
            place.view(self.dtype).view(tensor.shape).copy_(tensor)
        else:
            if self.dtype.itemsize == 1:
                tensor = tensor.view(torch.uint8)  # torch cannot copy every dtype as what it is
            place.copy_(_bytes_of(tensor.resolve_conj().resolve_neg().contiguous()))

    def read(self, data: memoryview, target: Tensor) -> None:
        """Copy `data`, or cast it in pieces."""
        if target.dtype is self.dtype:
            _bytes_of(target).numpy().data[:] = data
            return
        flat = target.view(-1)
        piece = torch.empty(min(_CAST_BYTES, data.nbytes), dtype=torch.uint8)
        for first, stop in _pieces(data.nbytes):
            _copy(data[first:stop], piece)
            values = piece[: stop - first].view(self.dtype)
            flat[first // self.dtype.itemsize : stop // self.dtype.itemsize].copy_(values)


class Blocks:
    """The scales of all blocks, as 32-bit floats, then the whole numbers."""

    name = "int8x256"

    def size(self, count: int) -> int:
        """Four bytes for each block, and one for each number."""
        return torch.float32.itemsize * blocks_in(count) + count

    def fits(self, target: Tensor, dtype: torch.dtype) -> bool:
        """Only 32-bit floats travel so, and they are read as such."""
        return target.dtype is dtype is torch.float32

    def write(self, tensor: Tensor, place: Tensor) -> None:
        """Round `tensor`."""
        border = self.size(tensor.numel()) - tensor.numel()
        scales, whole = place[:border].view(torch.float32), place[border:].view(torch.int8)
        quantise(tensor.detach().resolve_neg().contiguous().view(-1), whole, scales)

    def read(self, data: memoryview, target: Tensor) -> None:
        """Restore the numbers."""
        count = target.numel()
        scales, whole = torch.empty(blocks_in(count)), torch.empty(count, dtype=torch.int8)
        border = data.nbytes - count
        _copy(data[:border], scales)
        _copy(data[border:], whole)
        restore(whole, scales, target.view(-1))


_BLOCKS = Blocks()
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
FORMS: dict[str, WireForm] = {name: Numbers(dtype) for name, dtype in DTYPES.items()} | {_BLOCKS.name: _BLOCKS}
"""The forms by the name that messages give them."""


def form_of(dtype: torch.dtype, wire: Wire) -> WireForm:
    """Return the form in which numbers of `dtype` travel: 32-bit floats as `wire` says, everything else as it is."""
    if dtype is torch.float32 and wire is Wire.INT8:
        return _BLOCKS
    return Numbers(sent_as(dtype, wire))


def sent_as(dtype: torch.dtype, wire: Wire) -> torch.dtype:
    """The dtype to which `wire` rounds numbers of `dtype`, which is their own unless it is a format of 16 bits."""
    return _WIRE_DTYPES.get(wire, dtype) if dtype is torch.float32 else dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` in messages."""
    return str(dtype).removeprefix("torch.")


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    for first in range(0, size, _CAST_BYTES):
        yield first, min(first + _CAST_BYTES, size)


def _copy(data: memoryview, into: Tensor) -> None:
    _bytes_of(into).numpy().data[: data.nbytes] = data


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().as_strided(
        (tensor.numel(),), (1,)
    )  # one element may have any stride and count as contiguous
    return flat.view(torch.uint8)
