"""The calls that the eager tracer sees: what it records of them, which only ask about shapes, which it refuses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import is_tensor_method_or_property

from funcpipe.model.graph.autocast import Autocast
from funcpipe.model.graph.tracers import Unrecordable
from funcpipe.model.tensors import Tree


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
    """What runs without being looked into: its name, the path of its caller, and the tensors that it may read."""

    title: str
    caller: str
    tensors: Mapping[int, Tensor]


@dataclass(frozen=True, eq=False)
class Container:
    """How an object that holds tensors, such as a dataclass, is made of them; equal to that of a like object."""

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
    """Whether a result that is no tensor follows from shapes and types alone."""
    access = name in _METADATA or name in ("__get__", "__set__")
    return access or (name.startswith("is_") and name != "is_nonzero") or name in ("broadcast_shapes", "finfo", "iinfo")


def reads_sizes(func: Any, name: str) -> bool:
    """Whether the call tells its caller a size, or a number of tensors that follows from a size."""
    attribute = func.__self__.__name__ if name == "__get__" else ""
    return name in _SIZES or name in _COUNTED or attribute in ("shape", "nbytes")


def refuse_unrecordable(func: Any, name: str, given: list[Tensor]) -> None:
    """Raise Unrecordable if a call of `func` has effects that no node of a graph can repeat."""
    if name == "__set__" and func.__self__.__name__ != "requires_grad":
        raise Unrecordable(f"an assignment to .{func.__self__.__name__} cannot be recorded")
    if is_about_gradients(func, name):
        raise Unrecordable(f"{name}() in a forward pass cannot be recorded")
    if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in given):
        raise Unrecordable("transforms of torch.func cannot be recorded")


def is_about_gradients(func: Any, name: str) -> bool:
    """Whether a function computes gradients, or changes how they are computed."""
    if name in ("register_hook", "register_post_accumulate_grad_hook", "backward"):
        return True
    return str(getattr(func, "__module__", "")).startswith("torch.autograd") and name in ("grad", "backward")


def draws_random_numbers(target: Any) -> bool:
    """Whether a function is, by its name, one that draws random numbers."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return any(
        word in name for word in ("rand", "drop", "bernoulli", "normal", "uniform", "multinomial", "exponential")
    )
