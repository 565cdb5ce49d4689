"""Outputs and targets of micro-batches laid side by side, as those of one whole batch.

By hand: micro-batches of 2 and 1 samples have the outputs [[1], [2]] and [[3]], along whose first dimension samples
lie, and both the same temperature, 0.5. As one batch these are [[1], [2], [3]] and 0.5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpipe.errors import DataError
from funcpipe.model.tensors import flatten

WAY_OUT = (
    "coupled='cache' needs outputs and targets that are tensors [samples, …] of one shape, or the same in all "
    "micro-batches"
)

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Values besides tensors that may be the same in all micro-batches."""


@dataclass(frozen=True)
class BatchLayout:
    """The dimension along which samples lie in each leaf of (output, target); None where they do not, as all
    micro-batches have the same.
    """

    dims: tuple[int | None, ...]

    def join(self, values: Sequence[tuple[Any, Any]], samples: Sequence[int]) -> tuple[Any, Any]:
        """Return the output and the target of a batch, of those of its micro-batches, which have so many `samples`.

        All tensors are copies, into which a loss may write. Raises DataError for what cannot be laid side by side.
        """
        flat = [flatten(value) for value in values]
        paths = flat[0][1].paths("")
        for _, tree in flat:
            if tree.paths("") != paths or len(paths) != len(self.dims):
                raise DataError(
                    f"the outputs or targets of micro-batches differ in their parts: {_listed(paths)} and "
                    f"{_listed(tree.paths(''))}; {WAY_OUT}"
                )
        leaves = [
            _joined(name_of(path), [parts[i] for parts, _ in flat], samples, self.dims[i])
            for i, path in enumerate(paths)
        ]
        output, target = flat[0][1].unflatten(iter(leaves))
        return output, target


def first_dims(output: Any, target: Any) -> BatchLayout:
    """Return the layout if samples lie along the first dimension of all tensors that have one."""
    leaves, _ = flatten((output, target))
    return BatchLayout(tuple(0 if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves))


def name_of(path: str) -> str:
    """Return the leaf at a path in (output, target) in words: `.0.logits` is output.logits."""
    place, _, rest = path.removeprefix(".").partition(".")
    return ("output", "target")[int(place)] + (f".{rest}" if rest else "")


def described(leaf: Any) -> str:
    """Return a tensor by its shape; anything else by its type."""
    return f"a tensor {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"


def _joined(name: str, parts: Sequence[Any], samples: Sequence[int], dim: int | None) -> Any:
    if dim is None:
        for part, count in zip(parts, samples, strict=True):
            if not _equal(parts[0], part):
                raise _apart(name, (parts[0], samples[0]), (part, count))
        return parts[0].clone() if isinstance(parts[0], Tensor) else parts[0]
    for part, count in zip(parts, samples, strict=True):
        if not isinstance(part, Tensor) or _form(part, dim, count) != _form(parts[0], dim, samples[0]):
            raise _apart(name, (parts[0], samples[0]), (part, count))
    return torch.cat(list(parts), dim)


def _form(part: Tensor, dim: int, samples: int) -> Any:
    """The properties that parts must share to lie side by side: among them, as many whole rows for each sample."""
    if dim >= part.dim() or part.size(dim) % samples:
        return None, tuple(part.shape), samples
    return part.dtype, part.size(dim) // samples, tuple(size for i, size in enumerate(part.shape) if i != dim)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and torch.equal(one, other)
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and repr(one) == repr(other))


def _apart(name: str, one: tuple[Any, int], other: tuple[Any, int]) -> DataError:
    return DataError(
        f"{name} is {described(one[0])} and {described(other[0])} for {one[1]} and {other[1]} samples, which cannot be "
        f"laid side by side: {WAY_OUT}"
    )


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(map(name_of, paths))
