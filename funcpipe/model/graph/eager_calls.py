"""The calls that the eager tracer records, and those that read shapes, contents of tensors, or sizes that data decide.

Results of `nonzero`, `unique`, `x[mask]` and the like have as many elements as the data say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import is_tensor_method_or_property
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from funcpipe.model.graph.program import Autocast
from funcpipe.model.graph.tracers import Unrecordable
from funcpipe.model.tensors import flatten


class DataDependent(Unrecordable):
    """The code reads the contents of a tensor, or a size that follows from them, which change with the micro-batch."""


@dataclass(frozen=True)
class Entry:
    """One recorded call: fx's op and target, the arguments (with Refs for tensors), the call of the innermost module
    that made it, whether gradients were off, what autocast was set to; the path of the module whose code made it, and
    the line of that code.
    """

    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any
    call: tuple[str, int] | None
    no_grad: bool
    autocast: Autocast
    path: str
    where: str


@dataclass(frozen=True)
class Inside:
    """A leaf module or Function whose code runs: its name, the path of its caller, and the tensors that it may read."""

    title: str
    caller: str
    tensors: Mapping[int, Tensor]


def node_target(func: Any, name: str, args: Any) -> tuple[str, Any, Any]:
    """The op, the target and the arguments of fx's node for a call of `func`."""
    if name == "__get__":
        return "call_function", getattr, (args[0], func.__self__.__name__)
    if is_tensor_method_or_property(func) and args and isinstance(args[0], Tensor):
        return "call_method", name, args
    return "call_function", func, args


_SIZES = {"size", "numel", "nelement", "__len__", "stride"}
_COUNTED = {
    "unbind", "split", "split_with_sizes", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "unsafe_split",
    "unsafe_chunk",
}  # fmt: skip
_METADATA = _SIZES | {
    "dim", "storage_offset", "element_size", "ndimension", "get_device", "can_cast", "result_type", "promote_types",
    "__hash__", "__repr__", "__format__", "data_ptr", "untyped_storage", "has_names", "requires_grad_", "retain_grad",
}  # fmt: skip


def is_metadata(name: str) -> bool:
    """Return whether a result that is no tensor follows from shapes and types alone."""
    access = name in _METADATA or name in ("__get__", "__set__")
    return access or (name.startswith("is_") and name != "is_nonzero") or name in ("broadcast_shapes", "finfo", "iinfo")


def reads_sizes(func: Any, name: str) -> bool:
    """Return whether the call gives its caller a size, or a number of tensors that follows from a size."""
    attribute = func.__self__.__name__ if name == "__get__" else ""
    return name in _SIZES or name in _COUNTED or attribute in ("shape", "nbytes")


def draws_random_numbers(target: Any) -> bool:
    """Return whether a function is, by its name, one that draws random numbers."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return any(
        word in name for word in ("rand", "drop", "bernoulli", "normal", "uniform", "multinomial", "exponential")
    )


class DataSizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notice, while entered, operators whose results have as many elements as the data say.

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
    """Return whether the result is shaped like a first argument that is not marked, or by numbers alone."""
    first = next((item for item in args if isinstance(item, Tensor)), None)
    if name in _LIKE_FIRST:
        return first is not None and first not in marked
    sizes = flatten(args[1:])[0]
    return name in _OF_SIZES and bool(sizes) and all(isinstance(size, int) and size >= 0 for size in sizes)
