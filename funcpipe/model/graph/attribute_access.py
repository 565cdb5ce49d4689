"""Watch which code reads and writes attributes of a model's modules, while it runs."""

import contextlib
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from funcpipe.model.graph.python_state import Slot
from funcpipe.model.graph.user_code import calling_user_code, with_code


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
    """Within this context, every access to one of `slots` through a module is added to what this yields."""
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

    with contextlib.ExitStack() as patches:
        for name, patch in (
            ("__getattribute__", getattribute),
            ("__setattr__", setattribute),
            ("__delattr__", delattribute),
            ("__call__", call),
        ):
            patches.enter_context(_patched(name, patch))
        yield watch.found


@contextlib.contextmanager
def _patched(name: str, patch: Any) -> Iterator[None]:
    """Replace a method of all modules."""
    before = vars(nn.Module).get(name)
    setattr(nn.Module, name, patch)
    try:
        yield
    finally:
        if before is None:
            delattr(nn.Module, name)
        else:
            setattr(nn.Module, name, before)


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
        """While `module` runs; one that is not part of the model counts as the one that called it."""
        self._running.append(self._paths.get(id(module), self._running[-1] if self._running else ""))
        try:
            yield
        finally:
            self._running.pop()


def _line(frame: FrameType) -> str:
    """File, line and code of the user's code that is running in `frame`, or called it."""
    frame = calling_user_code(frame) or frame
    return with_code(f"{frame.f_code.co_filename}:{frame.f_lineno}")
