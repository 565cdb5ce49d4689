"""Find global variables that each forward of a model changes, such as a counter of steps, and refuse them.

A graph repeats what a forward computes and not what it does to Python's variables; and each function has a copy of the
user's modules of its own.
"""

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.graph.python_state import Contents, Nested, Object, comparable
from funcpipe.model.graph.reachable import attributes, globals_named, user_classes
from funcpipe.model.graph.user_code import find_line, is_user_code, is_users_file


class Variable(NamedTuple):
    """A variable that outlives a forward, in words, and the name for an attribute that could hold its value instead."""

    title: str
    attribute: str

    def __str__(self) -> str:
        return self.title


Read = Callable[[], Any]


def refuse_changing_globals(model: nn.Module, forward: Callable[[], Any]) -> None:
    """Raise ModelError if `forward`, which runs `model`, changes a global variable each time that it runs.

    Those that are filled once, such as tables and flags of warnings, are no concern.
    """
    with _touched_code() as touched:
        forward()
    variables = dict(_variables(model, touched))
    before = {variable: comparable(read(), {}) for variable, read in variables.items()}
    if not before:
        return
    for variable, value in before.items():
        if _has_history(value):
            raise ModelError(
                f"the forward of {type(model).__name__} leaves a tensor with its autograd history in {variable}, which "
                "code in another function, such as the loss, would not see; return it as a part of the model's output"
            )
    forward()
    for variable, value in before.items():
        if _differ(value, comparable(variables[variable](), {})):
            raise ModelError(_refusal(model, forward, variable, variables[variable]))


def _refusal(model: nn.Module, forward: Callable[[], Any], variable: Variable, read: Read) -> str:
    start = comparable(read(), {})
    line = find_line(model, forward, lambda: _differ(start, comparable(read(), {})))
    return (
        f"each forward changes {variable} ({line or type(model).__name__}), of which every function would have a copy "
        f"of its own; make it an attribute of the module that uses it (self.{variable.attribute}, set in __init__), "
        "which stays with its stage and counts micro-batches, or an input that the dataset returns"
    )


@contextlib.contextmanager
def _touched_code() -> Iterator[dict[CodeType, dict[str, Any]]]:
    """The code that runs in this context, apart from torch's and the standard library's, and its global variables."""
    found: dict[CodeType, dict[str, Any]] = {}

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code not in found and is_user_code(frame):
            found[frame.f_code] = frame.f_globals

    before = sys.gettrace()
    sys.settrace(note)
    try:
        yield found
    finally:
        sys.settrace(before)


def _variables(model: nn.Module, touched: Mapping[CodeType, dict[str, Any]]) -> Iterator[tuple[Variable, Read]]:
    """All variables that the code may change, by the names that it refers to."""
    for code, namespace in touched.items():
        home = str(namespace.get("__name__"))
        for name in globals_named(code):
            value = namespace.get(name)
            if isinstance(value, ModuleType) and is_users_file(getattr(value, "__file__", None) or ""):
                yield from _in_namespace(vars(value), code.co_names, value.__name__)
            elif isinstance(value, type) and _is_users(value):
                names = [inner for inner in vars(value) if not inner.startswith("__")]
                yield from _in_namespace(vars(value), names, f"{home}.{name}")
            elif name in namespace:
                yield from _in_namespace(namespace, [name], home)
    for kind in {kind for module in model.modules() for kind in user_classes(module)}:
        for name, item in vars(kind).items():
            if isinstance(item, FunctionType) and item.__code__ in touched and _can_change(item):
                yield _enclosed(f"{kind.__name__}.{name}"), functools.partial(vars(kind).get, name)


def _in_namespace(namespace: Mapping[str, Any], names: Iterable[str], home: str) -> Iterator[tuple[Variable, Read]]:
    for name in names:
        value = namespace.get(name)
        if name in namespace and _can_change(value):
            title = f"the global variable {name} of {home}"
            is_function = isinstance(value, FunctionType)
            variable = _enclosed(f"{home}.{name}") if is_function else Variable(title, name.lower())
            yield variable, functools.partial(namespace.get, name)


def _enclosed(function: str) -> Variable:
    return Variable(f"a default value or an enclosed variable of {function}", "state")


def _can_change(value: Any) -> bool:
    """Whether a variable with this value may be one that a forward changes: a number, a container, an object."""
    if isinstance(value, FunctionType):
        return bool(value.__closure__ or value.__defaults__)
    if value is None or isinstance(value, bool | int | float | complex | str | Tensor):
        return True
    if isinstance(value, nn.Module | type):
        return False
    if isinstance(value, dict | list | set | deque | tuple | np.ndarray | Iterator):
        return True
    return _is_users(type(value)) and attributes(value) is not None


def _is_users(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and is_users_file(file))


def _differ(one: Any, other: Any) -> bool:
    """Whether what two values hold differs. Objects that cannot be looked into count as the same."""
    if isinstance(one, Nested) and isinstance(other, Nested) and one.kind is other.kind:
        pairs = zip(one.items, other.items, strict=False)
        return len(one.items) != len(other.items) or any(_differ(*pair) for pair in pairs)
    if isinstance(one, Object) and isinstance(other, Object):
        return False
    return bool(one != other)


def _has_history(value: Any) -> bool:
    if isinstance(value, Contents):
        return value.has_history
    return isinstance(value, Nested) and any(_has_history(item) for item in value.items)
