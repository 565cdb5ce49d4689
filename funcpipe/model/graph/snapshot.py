"""What a model's code can change in place: the contents of all that its modules' attributes lead to, to be put back.

Containers are restored in place, so that whoever else holds one sees the old contents too: hooks, lists, dictionaries,
sets, deques, plain objects, the variables that hooks enclose, and tensors other than parameters.
"""

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DEPTH = 8
"""How deeply containers may be nested below a module's attributes."""

LEAVES = (str, bytes, int, float, complex, bool, type(None), type, BuiltinFunctionType, ModuleType, nn.Parameter)
"""What cannot change in place, or is not looked into."""


class Snapshot:
    """The present contents of all that is reachable from a module or another `root`: `restore` puts them back."""

    def __init__(self, root: Any) -> None:
        modules = list(root.modules()) if isinstance(root, nn.Module) else [root]
        self._seen: dict[int, Any] = {}  # keeps the objects, so that no id comes twice
        self._undo: list[Callable[[], None]] = []
        self._keep(modules)
        for kind in {kind for module in modules for kind in user_classes(module)}:
            self._keep_class(kind)

    def restore(self) -> None:
        """Give everything the contents that it had."""
        with torch.no_grad():
            for undo in self._undo:
                undo()

    def _keep(self, roots: Iterable[Any], depth: int = 0) -> None:
        for value in reachable(roots, self._seen, depth):
            undo = _undo(value)
            if undo is not None:
                self._undo.append(undo)

    def _keep_class(self, kind: type) -> None:
        kept = dict(vars(kind))
        self._undo.append(functools.partial(_restore_class, kind, kept))
        for item in kept.values():
            if isinstance(item, dict | list | set | deque):
                self._keep([item], 1)


def reachable(roots: Iterable[Any], seen: dict[int, Any], depth: int = 0) -> Iterator[Any]:
    """What `roots` are and lead to, besides `LEAVES`: each once, and nothing that is in `seen` by its id already."""
    for value in roots:
        if isinstance(value, LEAVES) or id(value) in seen or depth > DEPTH:
            continue
        seen[id(value)] = value
        yield value
        for part in parts(value):
            yield from reachable([part], seen, 0 if isinstance(part, nn.Module) else depth + 1)


def user_classes(value: Any) -> list[type]:
    """The classes of `value` that are not torch's: code may keep what it counts there."""
    return [kind for kind in type(value).__mro__ if kind.__module__.partition(".")[0] not in _NOT_USERS]


_NOT_USERS = ("torch", "builtins", "typing")


def parts(value: Any) -> Iterator[Any]:
    """What `value` holds: the items of a container, an object's attributes, the variables that a function encloses."""
    if isinstance(value, dict):
        yield from dict.values(value)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    elif isinstance(value, CellType):
        if not is_empty_cell(value):
            yield value.cell_contents
    elif isinstance(value, FunctionType):
        yield from value.__closure__ or ()
        yield from value.__defaults__ or ()
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif not isinstance(value, Tensor) and (namespace := attributes(value)) is not None:
        yield namespace


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an ordinary object, which is not torch's own: its operators keep caches of their own."""
    if type(value).__module__.partition(".")[0] == "torch" and not isinstance(value, nn.Module):
        return None
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _undo(value: Any) -> Callable[[], None] | None:
    """What puts the present contents of `value` back into it; None if it has none of its own."""
    if isinstance(value, OrderedDict):
        return functools.partial(_restore_items, OrderedDict, value, list(value.items()))
    if isinstance(value, dict):
        return functools.partial(_restore_items, dict, value, list(dict.items(value)))
    if isinstance(value, list):
        return functools.partial(list.__setitem__, value, slice(None), list(value))
    if isinstance(value, set):
        return functools.partial(_restore_members, set.clear, set.update, value, list(value))
    if isinstance(value, deque):
        return functools.partial(_restore_members, deque.clear, deque.extend, value, list(value))
    if isinstance(value, CellType) and not is_empty_cell(value):
        return functools.partial(setattr, value, "cell_contents", value.cell_contents)
    if isinstance(value, bytearray):
        return functools.partial(value.__setitem__, slice(None), bytes(value))
    if isinstance(value, np.ndarray) and value.flags.writeable:
        return functools.partial(np.copyto, value, value.copy())
    if isinstance(value, Tensor):
        return functools.partial(_restore_tensor, value, value.detach().clone())
    return None


def _restore_items(kind: Any, value: Any, items: list[tuple[Any, Any]]) -> None:
    now = list(kind.items(value))
    if len(now) == len(items) and all(a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True)):
        return
    kind.clear(value)
    for key, item in items:
        kind.__setitem__(value, key, item)


def _restore_members(clear: Callable[[Any], None], add: Callable[[Any, Any], None], value: Any, items: Any) -> None:
    clear(value)
    add(value, items)


def _restore_tensor(tensor: Tensor, old: Tensor) -> None:
    if tensor.shape != old.shape or tensor.dtype != old.dtype:
        tensor.data = old
    elif tensor.layout is not torch.strided or not torch.equal(tensor, old):
        tensor.detach().copy_(old)


def _restore_class(kind: type, kept: dict[str, Any]) -> None:
    for name in vars(kind).keys() - kept.keys():
        delattr(kind, name)
    for name, item in kept.items():
        if vars(kind).get(name) is not item:
            setattr(kind, name, item)


def is_empty_cell(cell: CellType) -> bool:
    """Whether the variable that `cell` stands for has no value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
