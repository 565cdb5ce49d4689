"""The values of a model's Python attributes, in a form that can be kept and compared."""

import functools
import pickle
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from funcpipe.model.graph.reachable import (
    DEPTH,
    OWN,
    attributes,
    is_empty_cell,
    named_parts,
    plain_attributes,
    reached_values,
    user_classes,
)
from funcpipe.model.tensors import same


class Slot(NamedTuple):
    """An attribute of the module at `path`; of its class, if the name of one comes first: `Gate.calls`."""

    path: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.path}.{self.attribute}" if self.path else self.attribute


State = Mapping[Slot, Any]
"""The value of each attribute, as what can be compared: numbers and strings with their types, and the classes below."""

_PLAIN_CONTAINERS = (list, tuple, dict, set, deque, torch.Size)
"""Containers of plain data, by their exact types."""


@dataclass(frozen=True, eq=False)
class Contents:
    """The contents of a tensor; equal only to the same bits of the same type."""

    tensor: Tensor
    has_history: bool

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Contents):
            return False
        one, two = self.tensor, other.tensor
        if one is two:
            return True
        if one.shape != two.shape or one.dtype != two.dtype or one.layout != two.layout:
            return False
        if one.layout is not torch.strided:
            return bool(torch.equal(one.to_dense(), two.to_dense()))
        return same(one, two)

    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class Object:
    """An object that is compared by identity, and kept alive so that no other has its identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Object) and self.value is other.value

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Nested:
    """The contents of a container, a function or an ordinary object of type `kind`."""

    kind: type
    items: tuple[Any, ...]


def read_state(model: nn.Module) -> State:
    """The values of all attributes of the modules of `model`, except what its parameters and buffers hold."""
    known: dict[int, tuple[Any, Any]] = {}
    found: dict[Slot, Any] = {}
    for path, module in model.named_modules():
        for name, value in _attributes_of(module):
            found[Slot(path, name)] = comparable(value, known)
    return found


def _attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """All attributes of `module` itself, and what the user's code may keep in its class, by name."""
    yield from plain_attributes(module).items()
    yield "training", module.training
    for name in ("_parameters", "_modules"):
        yield name, {key: Object(item) for key, item in vars(module)[name].items()}
    yield "_buffers", {key: item is None for key, item in module._buffers.items()}
    for name in _HOOKS:
        if vars(module).get(name):
            yield name, list(vars(module)[name].values())
    yield from _class_values(module)


def _class_values(value: Any) -> Iterator[tuple[str, Any]]:
    """The numbers and plain containers in the class of `value` that code may change there."""
    for kind in user_classes(value):
        for name, item in vars(kind).items():
            if not name.startswith("__") and type(item) in (*_PLAIN_CONTAINERS, *_NUMBERS):
                yield f"{kind.__name__}.{name}", item


_HOOKS = tuple(sorted(name for name in OWN if "hooks" in name and isinstance(vars(nn.Module())[name], dict)))

_NUMBERS = (int, float, complex, bool, str, type(None))

_FIXED = (
    *(type, BuiltinFunctionType, ModuleType, CodeType, nn.Module, nn.Parameter),
    *(torch.Generator, random.Random, np.random.Generator, np.random.RandomState),
)
"""Types that are compared by identity. Random number generators of a model's own are refused by what they draw."""


def comparable(value: Any, known: dict[int, tuple[Any, Any]], depth: int = 0) -> Any:
    """`value` as what can be kept and compared; objects met before are in `known`, by identity."""
    kind = type(value)
    if kind in _NUMBERS:
        return (kind, repr(value)) if kind in (float, complex) else (kind, value)
    if isinstance(value, Object):
        return value
    if isinstance(value, _FIXED) or depth > DEPTH:
        return Object(value)
    if id(value) not in known:
        known[id(value)] = value, Object(value)  # what holds itself is compared by identity there
        known[id(value)] = value, _inside(value, known, depth + 1)
    return known[id(value)][1]


def _inside(value: Any, known: dict[int, tuple[Any, Any]], depth: int) -> Any:
    if isinstance(value, Tensor):
        return _contents(value)
    items = _items(value)
    if items is None:
        return _opaque(value)
    return Nested(type(value), tuple(comparable(item, known, depth) for item in items))


def _items(value: Any) -> list[Any] | None:
    """The parts of `value`, in order; None if they are not known."""
    if isinstance(value, dict):
        return [part for pair in dict.items(value) for part in pair]
    if isinstance(value, list | tuple | deque):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, CellType):
        return [] if is_empty_cell(value) else [value.cell_contents]
    if isinstance(value, FunctionType):
        return [value.__code__, *(value.__closure__ or ()), *(value.__defaults__ or ())]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    namespace = attributes(value)
    return None if namespace is None else [namespace]


def _opaque(value: Any) -> Any:
    if type(value).__module__.partition(".")[0] == "torch":
        return Object(value)
    try:
        return type(value), pickle.dumps(value)
    except Exception:  # noqa: BLE001 - whatever cannot be pickled is compared by identity
        return Object(value)


def why_not_plain(value: Any) -> str | None:
    """The reason why an attribute's value, as `read_state` gives it, cannot be saved with a stage; None if it can."""
    if isinstance(value, Contents):
        return "a tensor with its autograd history" if value.has_history else None
    if isinstance(value, Nested):
        if value.kind not in _PLAIN_CONTAINERS:
            return f"a {value.kind.__name__}"
        return next((reason for item in value.items if (reason := why_not_plain(item))), None)
    if isinstance(value, Object):
        return f"a {type(value.value).__name__}"
    kind = value[0]
    return None if kind in _NUMBERS else f"a {kind.__name__}"


_MOST = 1000
"""Containers with more items count as changed if their length is: data sets, which losses do not write into."""


def reached_state(root: Any) -> State:
    """The values of all attributes and variables that `root` reaches, and of its tensors that may change."""
    known: dict[int, tuple[Any, Any]] = {}
    found: dict[Slot, Any] = {}
    for path, value in reached_values(root):
        for name, part in _parts(value):
            is_long = isinstance(part, list | tuple | dict | set) and len(part) > _MOST
            found[Slot(path, name)] = (type(part), len(part)) if is_long else comparable(part, known)
        if isinstance(value, nn.Module):
            found.update({Slot(path, name): _contents(tensor) for name, tensor in _tensors(value)})
    return found


def differing(one: State, other: State) -> list[Slot]:
    """The slots whose values differ; of one inside another, the inner one."""
    changed = [slot for slot in one.keys() | other.keys() if slot not in one or slot not in other]
    changed += [slot for slot in one.keys() & other.keys() if one[slot] != other[slot]]
    names = [str(slot) for slot in changed]
    inner = [slot for slot in changed if not any(name.startswith(f"{slot}.") for name in names)]
    return sorted(inner, key=str)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        yield from _attributes_of(value)
    elif not isinstance(value, list | tuple | dict | set | frozenset | Tensor):  # which are values of what holds them
        yield from ((name, part) for name, part in named_parts(value) if not isinstance(part, FunctionType))
        yield from _class_values(value)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and (tensor.requires_grad or not isinstance(tensor, nn.Parameter)):
            yield name, tensor


def _contents(tensor: Tensor) -> Contents:
    return Contents(tensor.detach().clone(), tensor.grad_fn is not None)
