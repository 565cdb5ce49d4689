"""What a hook of a parameter reaches when it is called: variables around it, defaults, globals, attributes, items.

A function holds its own copy of all that. So a hook must not reach the model, and must leave what it reaches as it is.
"""

import functools
import pickle
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from funcpipe.model.graph.snapshot import is_empty_cell
from funcpipe.model.split.bundle import is_user_module
from funcpipe.model.tensors import digest

_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.Size)
_SERIES = (list, tuple, set, frozenset, deque)
_CALLABLES = (FunctionType, MethodType, BuiltinFunctionType, MethodWrapperType, functools.partial)
_WALKED = (*_CALLABLES, CellType, ModuleType, type, nn.Module, Optimizer)
_WITHOUT_PARTS = (*_ATOMS, Tensor, np.ndarray, ModuleType)

Part = tuple[str, Any]
"""An object, and the path by which it is reached, such as `self.factors[0]`."""


def reached(hook: Any) -> Iterator[Part]:
    """All that `hook` reaches, itself first; each object once, numbers and strings wherever they are."""
    seen: dict[int, Any] = {}
    waiting: list[Part] = [("", hook)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen and not isinstance(value, _ATOMS):
            continue
        seen[id(value)] = value
        yield path, value
        waiting += reversed(list(_parts(path, value)))


def state_of(hook: Any, known: dict[int, Any]) -> list[Part]:
    """What `hook` reaches, in a form that is kept and compared; `known` are digests of tensors, by identity."""
    return [(path, _digest(value, known)) for path, value in reached(hook)]


def _parts(path: str, value: Any) -> Iterator[Part]:
    if isinstance(value, _WITHOUT_PARTS):
        return
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, _SERIES):
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, CellType):
        yield from () if is_empty_cell(value) else ((path, value.cell_contents),)
    elif isinstance(value, type):
        yield from _parts_of_class(path, value)
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    else:
        yield from _parts_of_object(path, value)


def _parts_of_object(path: str, value: Any) -> Iterator[Part]:
    if isinstance(value, MethodType):
        yield from ((path, value.__func__), (path or "self", value.__self__))
    elif isinstance(value, BuiltinFunctionType | MethodWrapperType):
        yield path or f"what {value.__name__} belongs to", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((path, value.func), (f"{path}.args", value.args), *_named("", value.keywords))
    elif _is_users(type(value).__module__) or isinstance(value, nn.Module | Optimizer):
        yield from _attributes(path or "self", value)
        yield path, type(value)


def _parts_of_function(function: FunctionType) -> Iterator[Part]:
    """Variables of functions around it, defaults, attributes and, in the user's own code, globals that it names."""
    code = function.__code__
    yield from zip(code.co_freevars, function.__closure__ or (), strict=True)
    defaults = function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount]
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    yield from _named("", function.__kwdefaults__ or {})
    yield from _named(function.__name__, vars(function))
    if not _is_users(function.__module__):
        return
    names = dict.fromkeys(_names_in(code))
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, ModuleType) and is_user_module(value):
            yield from _named(name, {key: item for key, item in vars(value).items() if key in names})


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _parts_of_class(path: str, kind: type) -> Iterator[Part]:
    if not _is_users(kind.__module__):
        return
    for name, item in vars(kind).items():
        function = item.__func__ if isinstance(item, staticmethod | classmethod) else item
        if isinstance(function, FunctionType) or not name.startswith("__"):
            yield f"{kind.__name__}.{name}", function
    yield from ((path, base) for base in kind.__bases__)


def _attributes(path: str, value: Any) -> Iterator[Part]:
    for name, item in vars(value).items() if hasattr(value, "__dict__") else ():
        if isinstance(value, nn.Module) and name in ("_parameters", "_buffers", "_modules"):
            yield from _named(path, item)
        else:
            yield f"{path}.{name}", item
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(value, name):
                yield f"{path}.{name}", getattr(value, name)


def _named(path: str, items: Mapping[str, Any]) -> Iterator[Part]:
    yield from ((f"{path}.{name}" if path else name, item) for name, item in items.items())


def _is_users(module: str | None) -> bool:
    """Whether the module of that name is the user's own code, not torch's or another package's."""
    if module is None or module == "__main__" or module not in sys.modules:
        return module is not None
    return is_user_module(sys.modules[module])


def _digest(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, _ATOMS):
        return type(value), repr(value)
    if isinstance(value, Tensor):
        if id(value) not in known:
            known[id(value)] = digest(value)
        return known[id(value)]
    if isinstance(value, (*_SERIES, Mapping)):
        return type(value), len(value)
    if isinstance(value, _WALKED) or _is_users(type(value).__module__):
        return type(value)
    try:
        return type(value), pickle.dumps(value)
    except Exception:  # noqa: BLE001 - what cannot be pickled is compared by its type
        return type(value)
