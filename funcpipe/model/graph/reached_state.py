"""What a callable could keep from one call to the next, as values that can be compared: all that it reaches."""

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from funcpipe.model.graph.python_state import Contents, Slot, State, attributes_of, class_values, comparable
from funcpipe.model.graph.reaches import named_parts, reaches

_MOST = 1000
"""Containers with more items count as changed if their length is: data sets, which losses do not write into."""


def reached_state(root: Any) -> State:
    """The values of all attributes and variables that `root` reaches, and of its tensors that may change."""
    known: dict[int, tuple[Any, Any]] = {}
    found: dict[Slot, Any] = {}
    for path, value in reaches(root):
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
        yield from attributes_of(value)
    elif not isinstance(value, list | tuple | dict | set | frozenset | Tensor):  # which are values of what holds them
        yield from ((name, part) for name, part in named_parts(value) if not isinstance(part, FunctionType))
        yield from class_values(value)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and (tensor.requires_grad or not isinstance(tensor, nn.Parameter)):
            yield name, tensor


def _contents(tensor: Tensor) -> Contents:
    return Contents(tensor.detach().clone(), tensor.grad_fn is not None)
