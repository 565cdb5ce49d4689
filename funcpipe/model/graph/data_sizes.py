"""Find the tensors whose sizes depend on the contents of others: results of nonzero, unique, x[mask] and the like."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from funcpipe.model.tensors import flatten


class DataSizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, notices operators whose results have as many elements as the data say.

    `follow` marks the results of a call whose sizes depend on data; what is computed from a marked tensor is marked
    too, unless its shape is known from elsewhere. A marked tensor may be used, but code must not ask for its sizes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._marked: Any = WeakIdKeyDictionary()
        self._noticed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and notice whether the shape of its result follows from data."""
        if torch.Tag.dynamic_output_shape in func.tags and (func is not _INDEX or _has_mask(args[1])):
            self._noticed = True
        return func(*args, **(kwargs or {}))

    def begin(self) -> None:
        """Forget what was noticed, before the next call."""
        self._noticed = False

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._marked

    def follow(self, name: str, args: Any, given: Sequence[Tensor], result: Any) -> None:
        """Mark the results of a call of the function `name`, which was `given` these tensors, as far as necessary."""
        if not self._noticed and not any(tensor in self._marked for tensor in given):
            return
        self._noticed = False
        if _shape_is_known(name, args, self._marked):
            return
        known = {id(tensor) for tensor in given}
        for leaf in flatten(result)[0]:
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and id(leaf) not in known:
                self._marked[leaf] = True


_INDEX = torch.ops.aten.index.Tensor


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


_LIKE_FIRST = {
    "index_add", "index_copy", "index_fill", "index_put", "index_reduce", "masked_fill", "masked_scatter", "put",
    "scatter", "scatter_add", "scatter_reduce", "select_scatter", "slice_scatter",
}  # fmt: skip
_OF_SIZES = {"view", "reshape", "expand", "new_zeros", "new_ones", "new_empty", "new_full", "broadcast_to"}


def _shape_is_known(name: str, args: Any, marked: Any) -> bool:
    """Whether the result is shaped like a first argument that is not marked, or by numbers alone."""
    first = next((item for item in args if isinstance(item, Tensor)), None)
    if name in _LIKE_FIRST:
        return first is not None and first not in marked
    sizes = flatten(args[1:])[0]
    return name in _OF_SIZES and bool(sizes) and all(isinstance(size, int) and size >= 0 for size in sizes)
