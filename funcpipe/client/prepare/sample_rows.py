"""The places of a batch's samples in nested values: found by comparing batches of two sizes.

A dimension that grows with the batch is one along which samples lie; a matrix of all samples with all has two. A list
that holds one item for each sample is cut as such.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpipe.model.tensors import Tree, flatten

_BY_ITEMS = (-1,)
"""The mark of a leaf that is a list with an item for each sample, in place of dimensions."""


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """A nested value of so many `samples`; `dims` are the dimensions along which they lie in each of its leaves.

    `varies` says whether a leaf along which they do not lie has another value in the other batch.
    """

    leaves: tuple[Any, ...]
    tree: Tree
    dims: tuple[tuple[int, ...], ...]
    samples: int
    varies: bool

    def take(self, samples: Sequence[int]) -> Any:
        """The same of some of the samples, of each as often as it is named; a copy, which may be changed."""
        pairs = zip(self.leaves, self.dims, strict=True)
        return self.tree.unflatten(iter([self._taken(leaf, dims, samples) for leaf, dims in pairs]))

    def of(self, leaves: Sequence[Any]) -> "SampleRows":
        """The same with other leaves."""
        return SampleRows(
            leaves=tuple(leaves), tree=self.tree, dims=self.dims, samples=self.samples, varies=self.varies
        )

    @property
    def form(self) -> tuple[Any, ...]:
        """The form that values must share to replace each other, sample by sample."""
        return (self.dims, *(_form(leaf, dims) for leaf, dims in zip(self.leaves, self.dims, strict=True)))

    def _taken(self, leaf: Any, dims: tuple[int, ...], samples: Sequence[int]) -> Any:
        if dims == _BY_ITEMS:
            return [leaf[i] for i in samples]
        if not isinstance(leaf, Tensor):
            return leaf
        taken = leaf.clone()
        for dim in dims:
            each = leaf.size(dim) // self.samples
            numbers = torch.tensor(samples)[:, None] * each + torch.arange(each)
            taken = taken.index_select(dim, numbers.flatten())
        return taken


def sample_rows(value: Any, samples: int, other: Any, other_samples: int) -> SampleRows | None:
    """The places of samples in `value`, which is like `other` for another number of them; None if that is not clear."""
    for are_items in (False, True):
        leaves, tree = flatten(value, opaque=_list_of(samples) if are_items else _nothing)
        others, other_tree = flatten(other, opaque=_list_of(other_samples) if are_items else _nothing)
        if tree.paths("") == other_tree.paths(""):
            pairs = list(zip(leaves, others, strict=True))
            found = [_dims(a, b, samples, other_samples) for a, b in pairs]
            dims = tuple(one for one in found if one is not None)
            if len(dims) < len(found):
                return None
            varies = any(not one and not _equal(a, b) for one, (a, b) in zip(dims, pairs, strict=True))
            return SampleRows(leaves=tuple(leaves), tree=tree, dims=dims, samples=samples, varies=varies)
    return None


def grown_dims(a: Tensor, b: Tensor, samples: int, other_samples: int) -> tuple[int, ...]:
    """The dimensions of `a` that are to those of `b` as `samples` are to `other_samples`."""
    sizes = enumerate(zip(a.shape, b.shape, strict=False))
    return tuple(dim for dim, (m, n) in sizes if m != n and m * other_samples == n * samples and not m % samples)


def _dims(a: Any, b: Any, samples: int, other_samples: int) -> tuple[int, ...] | None:
    if isinstance(a, list) and isinstance(b, list):
        return _BY_ITEMS
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return ()
    if a.dim() != b.dim():
        return None
    grown = grown_dims(a, b, samples, other_samples)
    return grown if grown or a.shape == b.shape else None


def _form(leaf: Any, dims: tuple[int, ...]) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    return leaf.dtype, tuple(size for dim, size in enumerate(leaf.shape) if dim not in dims)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    plain = (str, bytes, int, float, complex)
    return bool(operator.eq(a, b)) if isinstance(a, plain) and isinstance(b, plain) else True


def _list_of(count: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) == count


def _nothing(value: Any) -> bool:
    return False
