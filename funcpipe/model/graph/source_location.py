"""Locate in the user's code where an exception was raised, or random numbers were drawn without torch."""

import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from funcpipe.core.texts import error_line, error_text
from funcpipe.model.graph.isolation import generator_states
from funcpipe.model.installed import is_installed, is_standard

_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for package in (Path(__file__).parents[2], Path(torch.__file__).parent)
    for folder in (package, package.resolve())
)
"""The folders of funcpipe and torch, also where an environment reaches them by links: frames name files as imported."""

_TYPED = ("<ipython-input", "<python-input", "<stdin>")
"""What the names of files begin with whose code a user has typed."""


def source_location(model: nn.Module, error: BaseException) -> tuple[str | None, str]:
    """The path of the module in `model` whose code raised `error`, and a text with module, line and reason.

    The path is empty for the model itself, None if no module is found.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    path, location = _locate(model, [frame for frame, _ in frames], users_frame(frames))
    return path, f"{location}: {error_line(error)}"


def users_frame(frames: Iterable[tuple[FrameType, int]]) -> tuple[FrameType, int] | None:
    """The last of `frames` that runs code of the user's own, or else of an installed package besides torch."""
    lines = [(frame, line) for frame, line in frames if is_user_code(frame)]
    own = [(frame, line) for frame, line in lines if not is_installed(frame.f_code.co_filename)]
    return next(reversed(own or lines), None)


def current_line() -> str:
    """The file and the line of the user's code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def described(model: nn.Module, path: str, where: str, error: BaseException) -> str:
    """A text with a module, a line (as `current_line` gives it), the code there and the reason."""
    title = f"{path} ({type(model.get_submodule(path)).__name__})" if path else type(model).__name__
    return f"{title}, {with_code(where)}: {error_text(error)}"


def class_and_line(module: nn.Module) -> str:
    """The class of `module`, and the line on which its forward pass begins."""
    code = getattr(type(module).forward, "__code__", None)
    name = type(module).__name__
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def with_code(where: str) -> str:
    """A line, as `current_line` gives it, and the code there."""
    file, _, line = where.rpartition(":")
    return f"{where}: `{linecache.getline(file, int(line)).strip()}`"


def find_random_draw(model: nn.Module, run: Callable[[], Any]) -> tuple[str | None, str | None]:
    """The module and the line that first draw from numpy's or Python's global generator while `run` runs, if any do."""
    start = generator_states(("numpy", "random"))
    return find_line(model, run, lambda: generator_states(("numpy", "random")) != start)


def find_line(model: nn.Module, run: Callable[[], Any], happened: Callable[[], bool]) -> tuple[str | None, str | None]:
    """The module and the line after which it has first `happened` while `run` runs, if it has.

    The line is described with its module, file and code.
    """
    found: list[tuple[list[FrameType], tuple[FrameType, int]]] = []
    at: dict[FrameType, int] = {}

    def watch(frame: FrameType, event: str, arg: Any) -> Any:
        if not is_user_code(frame):
            return None
        if not found and event in ("line", "return") and happened():
            found.append((_callers(frame), (frame, at.get(frame, frame.f_lineno))))
        at[frame] = frame.f_lineno
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        run()
    finally:
        sys.settrace(before)
    return _locate(model, *found[0]) if found else (None, None)


def user_line(title: str) -> str:
    """The line of the user's code that is running, for a message; `title` says what the code belongs to."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_code(frame):
        frame = frame.f_back
    if frame is None:
        return title
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{title}, {file}:{line}: `{linecache.getline(file, line).strip()}`"


def _callers(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def is_user_code(frame: FrameType) -> bool:
    """Whether `frame` runs code of neither torch, funcpipe nor the standard library."""
    return _is_users(frame.f_code)


def _is_users(code: CodeType) -> bool:
    return is_users_file(code.co_filename)


@cache
def is_users_file(file: str) -> bool:
    """Whether code in `file` is of neither torch, funcpipe nor the standard library."""
    if not file or file.startswith("<"):
        return file.startswith(_TYPED)
    return not file.startswith(_LIBRARIES) and not is_standard(file)


@cache
def is_written_here(file: str) -> bool:
    """Whether the code of `file` belongs to no package that is installed: the user has written it."""
    if file.startswith("<"):  # typed, or given to exec()
        return not file.startswith("<frozen")
    return is_users_file(file) and not is_installed(file)


def _locate(model: nn.Module, frames: list[FrameType], last: tuple[FrameType, int] | None) -> tuple[str | None, str]:
    """The innermost module with a method among `frames`: its path, and a text with path, class, file, line and code."""
    paths = {id(module): name for name, module in model.named_modules()}
    owners = [frame.f_locals.get("self") for frame in reversed(frames)]
    owner = next((item for item in owners if id(item) in paths and isinstance(item, nn.Module)), None)
    path = None if owner is None else paths[id(owner)]
    title = f"{path} ({type(owner).__name__})" if path else type(model).__name__
    if last is None:
        return path, title
    frame, line = last
    code = linecache.getline(frame.f_code.co_filename, line).strip()
    return path, f"{title}, {frame.f_code.co_filename}:{line}: `{code}`"
