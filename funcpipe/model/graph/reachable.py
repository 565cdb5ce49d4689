"""All that a value leads to: attributes, items, variables that functions enclose, globals that they name.

    loss = partial(penalised, model=net)    ->    "model", "model.head", "model.head.weight", ...

`reachable` finds the objects that code may change, `reached_values` what a callable can use, with the path of each.
Code of installed packages is not looked into; what users write is.
"""

import dis
import functools
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from functools import cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.model.graph.user_code import is_written_here
from funcpipe.model.tensors import storage_id

DEPTH = 8
"""The depth to which containers may be nested below a module's attributes."""

_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, BuiltinFunctionType, ModuleType, nn.Parameter)
"""Types of objects that cannot change in place, or whose parts do not matter."""
_SURE_LEAVES = frozenset(_LEAVES)
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set, frozenset, deque})
"""Exact types that are asked for first: most objects are of one of them."""
OWN = frozenset(vars(nn.Module()))
"""The attributes that every module has."""


def reachable(roots: Iterable[Any], seen: dict[int, Any], depth: int = 0) -> Iterator[Any]:
    """The `roots` and all that they lead to, besides `_LEAVES`: each once, and nothing that `seen` has by its id."""
    for value in roots:
        kind = type(value)
        if kind in _SURE_LEAVES or id(value) in seen:
            continue
        level = depth if kind in _CONTAINERS or not isinstance(value, nn.Module) else 0
        if level > DEPTH or (kind not in _CONTAINERS and isinstance(value, _LEAVES)):
            continue
        seen[id(value)] = value
        yield value
        yield from reachable(parts(value), seen, level + 1)


def parts(value: Any) -> Iterator[Any]:
    """The parts of `value`: items of a container, an object's attributes, the variables that a function encloses."""
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


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of `module` itself that are not torch's own."""
    return {name: value for name, value in vars(module).items() if name not in OWN}


def user_classes(value: Any) -> list[type]:
    """The classes of `value` that are not torch's: code may keep what it counts there."""
    return [kind for kind in type(value).__mro__ if kind.__module__.partition(".")[0] not in _NOT_USERS]


_NOT_USERS = ("torch", "builtins", "typing")


def is_empty_cell(cell: CellType) -> bool:
    """Return whether the variable that `cell` stands for has no value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False


def reached_values(root: Any) -> Iterator[tuple[str, Any]]:
    """`root` and all that it reaches, each once, the nearest first, with its dotted path; numbers and strings are left
    out.
    """
    seen: dict[int, Any] = {id(root): root}  # keeps the objects, so that no id comes twice
    waiting = deque([("", root, 0)])
    while waiting:
        path, value, depth = waiting.popleft()
        yield path, value
        for name, part in named_parts(value):
            below = 0 if isinstance(part, nn.Module) else depth + 1
            if id(part) not in seen and below <= DEPTH and not _is_leaf(part):
                seen[id(part)] = part
                waiting.append((f"{path}.{name}".lstrip("."), part, below))


def reached_of(root: Any, wanted: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Those of the `wanted` objects, each with its name, that `root` reaches: the path by name.

    A tensor counts as reached too if another one with its memory is, such as a view or its `data`.
    """
    names: dict[int, str] = {}
    for name, item in wanted:
        names.setdefault(_identity(item), name)
    found: dict[str, str] = {}
    for path, value in reached_values(root):
        if _identity(value) in names:
            found.setdefault(names[_identity(value)], path)
    return found


def named_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of `value` by name: items of containers by their keys or numbers, the variables of functions."""
    if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType | type(None)):
        yield "__self__", value.__self__  # of a method such as list.append
    if isinstance(value, (*_LEAVES, Tensor)):
        return
    if isinstance(value, dict):
        yield from ((str(key), item) for key, item in dict.items(value))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((str(number), item) for number, item in enumerate(value))
    elif isinstance(value, FunctionType):
        yield from variables(value)
    elif isinstance(value, MethodType):
        yield "__self__", value.__self__
        yield "__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield "func", value.func
        yield from ((f"args.{number}", item) for number, item in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, weakref.ref):
        yield "__call__", value()
    elif isinstance(value, nn.Module):
        yield from _parts_of_module(value)
    else:
        yield from (attributes(value) or {}).items()
        yield from _slots(value)
        yield from _methods(value)


def variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables that `function` encloses, its defaults and attributes, and the globals that its code names."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        if not is_empty_cell(cell):
            yield name, cell.cell_contents
    positional = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=False)
    yield from (function.__kwdefaults__ or {}).items()
    yield from vars(function).items()
    for name in globals_named(code) if is_written_here(code.co_filename) else ():
        item = function.__globals__.get(name)
        if isinstance(item, ModuleType):
            yield from _variables_of_module(item, code)
        elif item is not None:
            yield name, item


@cache
def globals_named(code: CodeType) -> tuple[str, ...]:
    """The names of the globals that `code`, and the functions defined in it, read or write."""
    names = dict.fromkeys(
        str(instruction.argval) for instruction in dis.get_instructions(code) if "_GLOBAL" in instruction.opname
    )
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return tuple(dict.fromkeys([*names, *(name for item in inner for name in globals_named(item))]))


def _variables_of_module(module: ModuleType, code: CodeType) -> Iterator[tuple[str, Any]]:
    """The variables of a Python module that `code` may read, if the user wrote that module."""
    file = vars(module).get("__file__")
    for name in code.co_names if file and is_written_here(file) else ():
        if name in vars(module):
            yield f"{module.__name__.rpartition('.')[2]}.{name}", vars(module)[name]


def _parts_of_module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for entries in (module._parameters, module._buffers, module._modules, plain_attributes(module)):
        yield from entries.items()
    for name, hooks in vars(module).items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            yield from ((f"{name}.{number}", hook) for number, hook in enumerate(hooks.values()))
    yield from _methods(module)


def _methods(value: Any) -> Iterator[tuple[str, Any]]:
    """The functions of the class of `value` that the user wrote."""
    for kind in user_classes(value):
        for name, item in vars(kind).items():
            function = item.fget if isinstance(item, property) else getattr(item, "__func__", item)
            if isinstance(function, FunctionType) and is_written_here(function.__code__.co_filename):
                yield name, function


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in user_classes(value):
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(value, name):
                yield name, getattr(value, name)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, _LEAVES) and not isinstance(value, nn.Parameter | BuiltinFunctionType)


def _identity(value: Any) -> int:
    """A number that is the same for one object, and for tensors with one memory."""
    if isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta" and value.numel():
        return storage_id(value) or id(value)
    return id(value)
