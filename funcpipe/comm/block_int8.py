"""32-bit numbers as 8-bit ones with a scale for each block of 256: 1 + 4/256 bytes each.

A block's scale is its largest magnitude divided by 127, and a number travels as the whole number nearest to it divided
by the scale, of two as near the even one. So a number moves by at most 1/254 of the block's largest, and by what the
quotient and the product lose in 32 bits. For example:

    127.0  0.5  1.5  -0.0        the scale is 1.0
    127    0    2    (-128)      and 127.0, 0.0, 2.0, -0.0 come out

-128 is left to stand for -0.0, which marks a missing gradient (`training/gradients.py`). A block with a number that is
not finite comes out as NaN in whole, so no such number is lost.

`block_int8_kernel.c` does it in one pass over memory. Where no compiler built it, operators of torch give the same
bits in three to four times the processor time.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

kernel: Any
try:
    kernel = import_module("funcpipe.comm.block_int8_kernel")
except ImportError:  # built for another processor, or not at all
    kernel = None

BLOCK = 256
"""The count of numbers that share a scale."""

_MOST, _MISSING, _MISSING_BITS = 127.0, -128, -(2**31)
_LARGEST_SCALE = torch.finfo(torch.float32).max / _MOST * (1 - 2.0**-23)  # 127 of a larger one might be infinite

_NONE = torch.empty(0)
_AT_ONCE = 256 * BLOCK  # so that a part, its scratch and what it becomes stay in the processor's cache


def blocks_in(elements: int) -> int:
    """Return how many blocks, the last perhaps shorter, hold so many numbers."""
    return -(-elements // BLOCK)


def quantise(values: Tensor, whole: Tensor, scales: Tensor, *, kept: Tensor | None = None) -> None:
    """Write `values`, a vector of 32-bit numbers, as `whole` numbers (int8, one each) and `scales` (fp32, one a block).

    With `kept`, that is added to the values first, and becomes what the message leaves out. Of a missing value it stays
    as it is; where numbers are not finite, nothing is kept. All vectors are contiguous.
    """
    if kernel is not None:
        kernel.quantise(values.numpy(), whole.numpy(), scales.numpy(), (_NONE if kept is None else kept).numpy())
        return
    scratch = torch.empty(2, min(blocks_in(len(values)) * BLOCK, _AT_ONCE))
    for here, blocks in _parts(len(values)):
        _quantise_part(values[here], whole[here], scales[blocks], None if kept is None else kept[here], scratch)


def _quantise_part(values: Tensor, whole: Tensor, scales: Tensor, kept: Tensor | None, scratch: Tensor) -> None:
    """Quantise numbers that fit `scratch`, in passes over the cache: operators that select are avoided, being slow."""
    count = len(values)
    wanted, shares = (row[: len(scales) * BLOCK].view(-1, BLOCK) for row in scratch)
    numbers, rounded = wanted.view(-1)[:count], shares.view(-1)[:count]
    wanted.view(-1)[count:].zero_()
    bits = numbers.copy_(values).view(torch.int32)
    missing = bits == _MISSING_BITS if bits.amin() == _MISSING_BITS else None
    if kept is not None:
        numbers.add_(kept)
        if missing is not None:
            numbers.masked_fill_(missing, 0.0)
    torch.amax(torch.abs(wanted, out=shares), 1, out=scales).div_(_MOST)
    scales.nan_to_num_(torch.nan, torch.nan, torch.nan).clamp_(max=_LARGEST_SCALE)
    torch.div(wanted, scales.unsqueeze(1), out=shares).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-_MOST, _MOST)
    whole.copy_(rounded)
    if missing is not None:
        whole.masked_fill_(missing, _MISSING)
    if kept is not None:
        shares.mul_(scales.unsqueeze(1))
        torch.sub(numbers, rounded, out=rounded).nan_to_num_(0.0, 0.0, 0.0)
        kept.copy_(rounded if missing is None else torch.where(missing, kept, rounded))


def restore(whole: Tensor, scales: Tensor, into: Tensor, *, adds: bool = False) -> None:
    """Set `into`, a vector of 32-bit numbers, to what `whole` and `scales` stand for, or add that to it."""
    if kernel is not None:
        kernel.restore(whole.numpy(), scales.numpy(), into.numpy(), adds)
        return
    scratch = torch.empty(min(len(whole), _AT_ONCE) if adds else 0)
    for here, blocks in _parts(len(whole)):
        some, place = whole[here], into[here]
        came = scratch[: len(some)] if adds else place
        filled = len(some) // BLOCK * BLOCK
        came.copy_(some)[:filled].view(-1, BLOCK).mul_(scales[blocks][: filled // BLOCK, None])
        came[filled:].mul_(scales[blocks][-1])
        came.add_(0.0)  # a negative share of a scale that underflows is no missing number
        if some.amin() == _MISSING:
            came.masked_fill_(some == _MISSING, -0.0)
        if adds:
            place.add_(came)


def largest_in_blocks(values: Tensor) -> Tensor:
    """Return the largest magnitude of each number's block, in the shape of `values`, which are 32-bit numbers."""
    flat = values.detach().reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK))
    return padded.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)[: len(flat)].view(values.shape)


def _parts(elements: int) -> Iterator[tuple[slice, slice]]:
    """Yield the numbers, and their blocks, that are worked on at once, one part after another."""
    for start in range(0, elements, _AT_ONCE):
        stop = min(start + _AT_ONCE, elements)
        yield slice(start, stop), slice(start // BLOCK, blocks_in(stop))
