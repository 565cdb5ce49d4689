"""What tracing has assumed of sizes and numbers, as nodes of the graph that check it on every micro-batch.

Code that asks for a size gets a Python number while it is traced, and may do anything with it: the graph is right only
for tensors of that size. So each such question leaves a node behind that compares a few integers.
"""

from typing import Any, NoReturn

from torch import Tensor

from funcpipe.errors import DataError


def expect_sizes(tensor: Tensor, path: str, where: str, rank: int | None, *sizes: int) -> None:
    """Check that `tensor` has `rank` dimensions, unless that is None, and `sizes`: pairs of a dimension and its size.

    `where` tells the line of the module at `path` whose code has read them. Raises DataError.
    """
    shape = tensor.shape
    if rank is not None and len(shape) != rank:
        _refuse(f"a tensor with {rank} dimensions", f"a tensor of the shape {_text(shape)}", path, where)
    for i in range(0, len(sizes), 2):
        if shape[sizes[i]] != sizes[i + 1]:
            expected = f"{sizes[i + 1]} in dimension {sizes[i]}"
            _refuse(expected, f"a tensor of the shape {_text(shape)}", path, where)


def expect_number(number: Any, path: str, where: str, expected: Any) -> None:
    """Check that `number`, or a choice that follows from numbers, is the `expected` one; raises DataError."""
    if number != expected:
        _refuse(repr(expected), repr(number), path, where)


def expect_count(items: Any, path: str, where: str, expected: int) -> None:
    """Check that there are as many `items` as `expected`; raises DataError."""
    if len(items) != expected:
        _refuse(f"{expected} items", f"{len(items)}", path, where)


EXPECTATIONS = frozenset({expect_sizes, expect_number, expect_count})
"""The functions of nodes that check what tracing has assumed."""


def _refuse(expected: str, found: str, path: str, where: str) -> NoReturn:
    block = f', or trace the module as one block: blocks=["{path}"]' if path else ""
    raise DataError(
        f"{where} was traced for {expected}, but got {found}: its results would be wrong. Give all micro-batches "
        f"inputs of the sample's shapes (pad them, or put samples of one length into a dataset of their own){block}"
    )


def _text(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"
