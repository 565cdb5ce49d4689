"""Tensors by name: a model's parameters and buffers, as its `state_dict` names them, and the leaves of nested values.

Tuples, lists, dicts, named tuples, dataclasses and all types registered with torch's pytree are containers; anything
else (tensors, numbers, None, strings, objects) is a leaf.
"""

import contextlib
import copy
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.utils import _pytree  # private, but the only registry that users' and packages' types are in


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of `model`, a tied one under each of its names.

    These are the entries of its `state_dict`, unless its modules say otherwise.
    """
    transient = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in (*module._non_persistent_buffers_set, *_constants(module))
    }
    buffers = {name: t for name, t in model.named_buffers(remove_duplicate=False) if name not in transient}
    return {**dict(model.named_parameters(remove_duplicate=False)), **buffers}


def _constants(module: nn.Module) -> list[str]:
    """The buffers of `module` that are constants of code that torch.fx has traced."""
    if not isinstance(module, torch.fx.GraphModule):
        return []
    return [name for name in module._buffers if name.startswith("_tensor_constant")]


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the parameters and buffers of `model` that have their names; others stay as they are."""
    own = named_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def saved_state(model: nn.Module) -> dict[str, Any]:
    """A copy of the `state_dict` of `model`, in which tied tensors are still one."""
    return copy.deepcopy(dict(model.state_dict()))


def is_dense(tensor: Tensor) -> bool:
    """Return whether `tensor` is an array of its elements, which alone can be saved and sent."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def fingerprint(tensor: Tensor) -> str | None:
    """What stands for the contents of a tensor that has none (`weightless.py`); None for one that has."""
    mode = getattr(tensor, "fake_mode", None)
    return None if mode is None else str(mode.fingerprint(tensor))


def is_weightless(module: nn.Module) -> bool:
    """Return whether weights of `module` have no contents."""
    return any(hasattr(tensor, "fake_mode") for tensor in (*module.parameters(), *module.buffers()))


def storage_id(tensor: Tensor) -> int:
    """The identity of the memory of `tensor`, which views of it share."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if fingerprint(tensor) is None else -storage._cdata


def same(one: Tensor | None, other: Tensor) -> bool:
    """Return whether both hold the same, where a NaN equals a NaN."""
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if fingerprint(one) is not None or fingerprint(other) is not None:
        return fingerprint(one) == fingerprint(other)
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def digest(tensor: Tensor) -> Any:
    """A short form of what `tensor` holds, to see whether it changes: its dtype, its shape and a checksum."""
    form = tensor.dtype, tuple(tensor.shape)
    if (own := fingerprint(tensor)) is not None:
        return (*form, own)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return (*form, repr(tensor))
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return (*form, zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().data))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one of torch's threads: a function's vCPUs are counted in such threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Tree:
    """The structure of a nested value: a leaf (`build` is None), or children, named by `keys`, and how to join them."""

    build: Callable[[list[Any]], Any] | None = None
    keys: tuple[str, ...] = ()
    children: tuple["Tree", ...] = ()

    def paths(self, root: str) -> tuple[str, ...]:
        """A dotted path for every leaf: `root`, then the keys that lead to it."""
        if self.build is None:
            return (root,)
        branches = zip(self.keys, self.children, strict=True)
        return tuple(path for key, child in branches for path in child.paths(f"{root}.{key}"))

    def unflatten(self, leaves: Iterator[Any]) -> Any:
        """The nested value with the given leaves, in order."""
        if self.build is None:
            return next(leaves)
        return self.build([child.unflatten(leaves) for child in self.children])


LEAF = Tree()


def flatten(value: Any, *, opaque: Callable[[Any], bool] = lambda value: False) -> tuple[list[Any], Tree]:
    """The leaves of `value`, in order, and the tree that rebuilds it; a value that is `opaque` is a leaf."""
    parts = None if opaque(value) else _children(value)
    if parts is None:
        return [value], LEAF
    build, keys, items = parts
    leaves: list[Any] = []
    children = []
    for item in items:
        below, child = flatten(item, opaque=opaque)
        leaves += below
        children.append(child)
    return leaves, Tree(build, tuple(map(str, keys)), tuple(children))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among the leaves of `value`, in order."""
    return [value] if isinstance(value, Tensor) else [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def tree_map(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to each of its leaves."""
    leaves, tree = flatten(value)
    return tree.unflatten(iter([change(leaf) for leaf in leaves]))


def stand_in(value: Any) -> Any:
    """`value` with random numbers in place of tensors without contents, or zeros in place of whole ones."""

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or fingerprint(leaf) is None:
            return leaf
        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
        with torch.no_grad():
            filled = made.normal_() if made.is_floating_point() or made.is_complex() else made.zero_()
        return filled.requires_grad_(leaf.requires_grad)

    return tree_map(value, real)


def copied(value: Any) -> Any:
    """`value` with copies of its tensors, which code may write into."""
    return tree_map(value, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def _children(value: Any) -> tuple[Callable[[list[Any]], Any], list[Any], list[Any]] | None:
    kind = type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return partial(_dataclass, kind, tuple(names)), names, [getattr(value, name) for name in names]
    if kind in _pytree.SUPPORTED_NODES:
        items, context = _pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        keys = list(value) if isinstance(value, Mapping) else list(range(len(items)))
        return partial(_registered, kind, context), keys, list(items)
    if isinstance(value, tuple):
        build = partial(_named_tuple, kind) if hasattr(value, "_fields") else kind
        return build, list(getattr(value, "_fields", range(len(value)))), list(value)
    if isinstance(value, list):
        return list, list(range(len(value))), list(value)
    if isinstance(value, dict):
        return partial(_mapping, kind, tuple(value)), list(value), list(value.values())
    return None


def _dataclass(kind: type, names: tuple[str, ...], items: list[Any]) -> Any:
    given = dict(zip(names, items, strict=True))
    made = kind(**{field.name: given[field.name] for field in dataclasses.fields(kind) if field.init})
    for field in dataclasses.fields(kind):
        if not field.init:
            object.__setattr__(made, field.name, given[field.name])
    return made


def _registered(kind: type, context: Any, items: list[Any]) -> Any:
    return _pytree.SUPPORTED_NODES[kind].unflatten_fn(items, context)


def _named_tuple(kind: Any, items: list[Any]) -> Any:
    return kind._make(items)  # as it is: PackedSequence looks at what it is made of, which may be symbolic


def _mapping(kind: type, keys: tuple[Any, ...], items: list[Any]) -> Any:
    return kind(zip(keys, items, strict=True))
