"""32-bit numbers as 8-bit ones with a scale for each block of 256: 1 + 4/256 bytes each.

A block's scale is its largest magnitude divided by 127, and a number travels as the whole number nearest to it divided
by the scale, of two as near the even one. So a number moves by at most 1/254 of the block's largest, and by what the
quotient and the product lose in 32 bits. For example:

    127.0  0.5  1.5  -0.0        the scale is 1.0
    127    0    2    (-128)      and 127.0, 0.0, 2.0, -0.0 come out

-128 is left to stand for -0.0, which marks a missing gradient (`training/gradients.py`). A block with a number that is
not finite comes out as NaN in whole, so no such number is lost.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 256
"""The count of numbers that share a scale."""

_MOST, _MISSING = 127.0, -128
_LARGEST_SCALE = torch.finfo(torch.float32).max / _MOST * (1 - 2.0**-23)  # 127 of a larger one might be infinite

AT_ONCE = 256 * BLOCK
"""The count of numbers that are best worked on at once, so that they stay in the processor's cache."""


def blocks_in(elements: int) -> int:
    """Return how many blocks, the last perhaps shorter, hold so many numbers."""
    return -(-elements // BLOCK)


def parts(elements: int) -> Iterator[tuple[slice, slice]]:
    """Yield the numbers, and their blocks, that are worked on at once, one part after another."""
    for start in range(0, elements, AT_ONCE):
        stop = min(start + AT_ONCE, elements)
        yield slice(start, stop), slice(start // BLOCK, blocks_in(stop))


def quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """`values`, a vector of 32-bit numbers, as whole numbers (int8, one each) and scales (float32, one a block)."""
    rows = _rows(values)
    scales = rows.abs().amax(1) / _MOST
    scales.masked_fill_(~scales.isfinite(), torch.nan).clamp_(max=_LARGEST_SCALE)
    shares = rows / scales.unsqueeze(1)
    whole = shares.nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-_MOST, _MOST).to(torch.int8)
    whole.masked_fill_(is_missing(rows), _MISSING)
    return whole.view(-1)[: values.numel()], scales


def restored(whole: Tensor, scales: Tensor, into: Tensor) -> None:
    """Write the numbers that `whole` and `scales` stand for into `into`, a vector of 32-bit numbers."""
    filled = len(whole) // BLOCK * BLOCK
    torch.mul(whole[:filled].view(-1, BLOCK), scales[: filled // BLOCK, None], out=into[:filled].view(-1, BLOCK))
    if filled < len(whole):
        torch.mul(whole[filled:], scales[-1], out=into[filled:])
    into.add_(0.0)  # a negative share of a scale that underflows is no missing number
    into.masked_fill_(whole == _MISSING, -0.0)


def largest_in_blocks(values: Tensor) -> Tensor:
    """Return the largest magnitude of each number's block, in the shape of `values`, which are 32-bit numbers."""
    flat = values.detach().reshape(-1)
    return _rows(flat).abs().amax(1).repeat_interleave(BLOCK)[: len(flat)].view(values.shape)


def is_missing(values: Tensor) -> Tensor:
    """Return True for those of `values` that are -0.0."""
    return values.signbit() & (values == 0)


def _rows(values: Tensor) -> Tensor:
    """Return `values` in rows of a block each, the last filled up with zeros."""
    short = blocks_in(len(values)) * BLOCK - len(values)
    return (torch.nn.functional.pad(values, (0, short)) if short else values).view(-1, BLOCK)
