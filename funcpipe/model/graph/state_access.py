"""Find the state that a model's code uses while it runs: attributes of modules, and global variables.

A global variable that each forward changes, such as a counter of steps, is refused: a graph repeats what a forward
computes and not what it does to Python's variables, and each function has a copy of the user's modules of its own.
"""

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.graph.patches import patched
from funcpipe.model.graph.python_state import Contents, Nested, Object, Slot, comparable
from funcpipe.model.graph.reachable import attributes, globals_named, user_classes
from funcpipe.model.graph.user_code import (
    calling_user_code,
    find_line,
    is_user_code,
    is_users_file,
    run_watched,
    with_code,
)


@dataclass(frozen=True)
class Access:
    """Code that read or wrote an attribute: the paths of the modules that were running, outermost first, and its line.

    The outermost is the model itself, whose path is empty. `is_read` is false where a new value was assigned.
    """

    running: tuple[str, ...]
    line: str
    is_read: bool


@contextlib.contextmanager
def watched_attributes(model: nn.Module, slots: Collection[Slot]) -> Iterator[dict[Slot, list[Access]]]:
    """Record every access to one of `slots` through a module, in what this yields."""
    watch = _Watch(model, slots)
    read, write, remove, run = object.__getattribute__, nn.Module.__setattr__, nn.Module.__delattr__, nn.Module.__call__

    def getattribute(module: nn.Module, name: str) -> Any:
        watch.note(module, name, is_read=True)
        return read(module, name)

    def setattribute(module: nn.Module, name: str, value: Any) -> None:
        watch.note(module, name, is_read=False)
        write(module, name, value)

    def delattribute(module: nn.Module, name: str) -> None:
        watch.note(module, name, is_read=True)
        remove(module, name)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with watch.inside(module):
            return run(module, *args, **kwargs)

    methods = {"__getattribute__": getattribute, "__setattr__": setattribute, "__delattr__": delattribute}
    with patched(nn.Module, **methods, __call__=call):
        yield watch.found


class _Watch:
    """The accesses to some attributes so far, and the paths of the modules that are running."""

    def __init__(self, model: nn.Module, slots: Collection[Slot]) -> None:
        self.found: dict[Slot, list[Access]] = {slot: [] for slot in slots}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._names = {slot.attribute for slot in slots}
        self._running: list[str] = []

    def note(self, module: nn.Module, name: str, *, is_read: bool) -> None:
        """Add an access by the code that called the caller, if it is one to look for."""
        if name in self._names:
            slot = Slot(self._paths.get(id(module), ""), name)
            if slot in self.found:
                self.found[slot].append(Access(tuple(self._running), _line(sys._getframe(2)), is_read))

    @contextlib.contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Note that `module` runs; one that is not part of the model counts as the one that called it."""
        self._running.append(self._paths.get(id(module), self._running[-1] if self._running else ""))
        try:
            yield
        finally:
            self._running.pop()


def _line(frame: FrameType) -> str:
    """File, line and code of the user's code that is running in `frame`, or called it."""
    frame = calling_user_code(frame) or frame
    return with_code(f"{frame.f_code.co_filename}:{frame.f_lineno}")


class _Variable(NamedTuple):
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
    variables = dict(_variables(model, _touched_code(forward)))
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


def _refusal(model: nn.Module, forward: Callable[[], Any], variable: _Variable, read: Read) -> str:
    start = comparable(read(), {})
    line = find_line(model, forward, lambda: _differ(start, comparable(read(), {})))
    return (
        f"each forward changes {variable} ({line or type(model).__name__}), of which every function would have a copy "
        f"of its own; make it an attribute of the module that uses it (self.{variable.attribute}, set in __init__), "
        "which stays with its stage and counts micro-batches, or an input that the dataset returns"
    )


def _touched_code(run: Callable[[], Any]) -> dict[CodeType, dict[str, Any]]:
    """The code that runs in `run`, apart from torch's and the standard library's, and its global variables."""
    found: dict[CodeType, dict[str, Any]] = {}

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if frame.f_code not in found and is_user_code(frame):
            found[frame.f_code] = frame.f_globals

    run_watched(run, note)
    return found


def _variables(model: nn.Module, touched: Mapping[CodeType, dict[str, Any]]) -> Iterator[tuple[_Variable, Read]]:
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


def _in_namespace(namespace: Mapping[str, Any], names: Iterable[str], home: str) -> Iterator[tuple[_Variable, Read]]:
    for name in names:
        value = namespace.get(name)
        if name in namespace and _can_change(value):
            title = f"the global variable {name} of {home}"
            is_function = isinstance(value, FunctionType)
            variable = _enclosed(f"{home}.{name}") if is_function else _Variable(title, name.lower())
            yield variable, functools.partial(namespace.get, name)


def _enclosed(function: str) -> _Variable:
    return _Variable(f"a default value or an enclosed variable of {function}", "state")


def _can_change(value: Any) -> bool:
    """Return whether a variable with this value may be one that a forward changes: a number, a container, an object."""
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
    """Return whether what two values hold differs. Objects that cannot be looked into count as the same."""
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
