"""Functions that nodes of a traced graph call, besides torch's and the user's.

Code that asks for a size gets a Python number while it is traced, and may do anything with it: the graph is right only
for tensors of that size. So each such question leaves a node behind that compares a few integers in every micro-batch.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from funcpipe.errors import DataError
from funcpipe.model.tensors import Tree, flatten


def identity(tensor: Tensor) -> Tensor:
    """`tensor` itself; as a node, its value after a preceding write."""
    return tensor


def expect_sizes(tensor: Tensor, path: str, where: str, rank: int | None, *sizes: int) -> None:
    """Check that `tensor` has `rank` dimensions, unless that is None, and `sizes`: pairs of a dimension and its size.

    `where` names the line of the module at `path` whose code has read them. Raises DataError.
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


@dataclass(frozen=True, eq=False)
class Container:
    """The way to make an object that holds tensors, such as a dataclass; equal to that of a like object."""

    tree: Tree
    kind: type

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Container):
            return NotImplemented
        return self.kind is other.kind and self.tree.paths("") == other.tree.paths("")

    def __hash__(self) -> int:
        return hash((self.kind, self.tree.paths("")))


def rebuilt(container: Container, leaves: list[Any]) -> Any:
    """The object with these leaves."""
    return container.tree.unflatten(iter(leaves))


def leaf_at(value: Any, path: str) -> Any:
    """The leaf of a nested value at `path`."""
    leaves, tree = flatten(value)
    return leaves[tree.paths("").index(path)]


def linear(batch: int, slope: float, offset: float) -> float:
    """A number that grows linearly with the batch size."""
    return batch * slope + offset


def reciprocal(batch: int, numerator: float) -> float:
    """A number that is inversely proportional to the batch size."""
    return numerator / batch
