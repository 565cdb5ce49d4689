"""The user's code: which files it is in, where in it an error was raised, numbers were drawn, or two runs differed."""

import importlib.metadata
import linecache
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from funcpipe.core.texts import error_line, error_text
from funcpipe.model.draws import generator_states
from funcpipe.model.tensors import same, tensors_in

_STANDARD = tuple({os.path.realpath(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")})

_SITES = tuple(
    {
        os.path.realpath(folder)
        for folder in (
            *(sysconfig.get_path(kind) for kind in ("purelib", "platlib")),
            *site.getsitepackages(),
            site.getusersitepackages(),
        )
    }
)
"""The folders into which this interpreter installs packages."""

_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for package in (Path(__file__).parents[2], Path(torch.__file__).parent)
    for folder in (package, package.resolve())
)
"""The folders of funcpipe and torch, also where an environment reaches them by links: frames name files as imported."""

_TYPED = ("<ipython-input", "<python-input", "<stdin>")
"""Beginnings of the names of files whose code a user has typed."""


@cache  # every stage asks it of thousands of modules
def is_installed(file: str) -> bool:
    """Return whether `file` belongs to the standard library or to an installed package, wherever it lies.

    The metadata beside a package that lies in a folder of its own, as by `pip install --target`, say that it is
    installed. One that is installed to be edited, or lies on the path without metadata, is the user's own.
    """
    path = os.path.realpath(file)
    if is_standard(file) or _is_below(path, _SITES):
        return True
    folders = {os.path.realpath(folder or os.getcwd()) for folder in sys.path}
    entry = next((str(folder) for folder in Path(path).parents if str(folder) in folders), None)
    return entry is not None and _top(os.path.relpath(path, entry)) in _installed_at(entry)


@cache
def is_standard(file: str) -> bool:
    """Return whether `file` belongs to the standard library."""
    path = os.path.realpath(file)
    return _is_below(path, _STANDARD) and not _is_below(path, _SITES)


@cache
def is_users_file(file: str) -> bool:
    """Return whether code in `file` is of neither torch, funcpipe nor the standard library."""
    if not file or file.startswith("<"):
        return file.startswith(_TYPED)
    return not file.startswith(_LIBRARIES) and not is_standard(file)


@cache
def is_written_here(file: str) -> bool:
    """Return whether the code of `file` belongs to no package that is installed: the user has written it."""
    if file.startswith("<"):  # typed, or given to exec()
        return not file.startswith("<frozen")
    return is_users_file(file) and not is_installed(file)


def is_user_code(frame: FrameType) -> bool:
    """Return whether `frame` runs code of neither torch, funcpipe nor the standard library."""
    return is_users_file(frame.f_code.co_filename)


@cache
def _installed_at(folder: str) -> frozenset[str]:
    """The names of the packages and modules that are installed in a folder or an archive of `sys.path`."""
    found = importlib.metadata.distributions(path=[folder])
    records = [record for one in found if (record := one.read_text("RECORD")) is not None]
    return frozenset(_top(line.partition(",")[0]) for record in records for line in record.splitlines())


def _top(path: str) -> str:
    """The name of the package or module that a file belongs to."""
    return path.replace(os.sep, "/").partition("/")[0].partition(".")[0]


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path.startswith(folder + os.sep) for folder in folders)


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
    frame = calling_user_code(sys._getframe(1))
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def user_line(title: str) -> str:
    """The line of the user's code that is running, for a message; `title` says what the code belongs to."""
    where = current_line()
    return f"{title}, {with_code(where)}" if where else title


def calling_user_code(frame: FrameType | None) -> FrameType | None:
    """The frame itself or the innermost of its callers that runs the user's code."""
    while frame is not None and not is_user_code(frame):
        frame = frame.f_back
    return frame


def described(model: nn.Module, path: str, where: str, error: BaseException) -> str:
    """A text with a module, a line (as `current_line` gives it), the code there and the reason."""
    return f"{title_of(model, path)}, {with_code(where)}: {error_text(error)}"


def title_of(model: nn.Module, path: str) -> str:
    """The path and the class of a module in `model`, for a message."""
    name = type(model.get_submodule(path)).__name__
    return f"{path} ({name})" if path else name


def class_and_line(module: nn.Module) -> str:
    """The class of `module`, and the line on which its forward pass begins."""
    code = getattr(type(module).forward, "__code__", None)
    name = type(module).__name__
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def with_code(where: str) -> str:
    """A line, as `current_line` gives it, and the code there."""
    file, _, line = where.rpartition(":")
    return f"{where}: `{linecache.getline(file, int(line)).strip()}`"


def find_random_draw(model: nn.Module, run: Callable[[], Any]) -> str | None:
    """The line that first draws from numpy's or Python's global generator while `run` runs, if one does."""
    start = generator_states(("numpy", "random"))
    return find_line(model, run, lambda: generator_states(("numpy", "random")) != start)


def find_line(model: nn.Module, run: Callable[[], Any], happened: Callable[[], bool]) -> str | None:
    """The line after which it has first `happened` while `run` runs, with its module, file and code; None if never."""
    found: list[tuple[list[FrameType], tuple[FrameType, int]]] = []
    at: dict[FrameType, int] = {}

    def watch(frame: FrameType, event: str, arg: Any) -> Any:
        if not is_user_code(frame):
            return None
        if not found and event in ("line", "return") and happened():
            callers = [caller for caller, _ in traceback.walk_stack(frame)]
            found.append((callers[::-1], (frame, at.get(frame, frame.f_lineno))))
        at[frame] = frame.f_lineno
        return watch

    run_watched(run, watch)
    return _locate(model, *found[0])[1] if found else None


def run_watched(run: Callable[[], Any], watch: Callable[[FrameType, str, Any], Any]) -> None:
    """Run `run` with `watch` as this thread's trace function; one that was there, such as coverage's, goes on after."""
    before = sys.gettrace()
    sys.settrace(watch)
    try:
        run()
    finally:
        sys.settrace(before)
        _call_nothing()


def _call_nothing() -> None:
    """Be called: a tracer in C takes over again with the next call, and must before the function that watched ends."""


def _locate(model: nn.Module, frames: list[FrameType], last: tuple[FrameType, int] | None) -> tuple[str | None, str]:
    """The innermost module with a method among `frames`: its path, and a text with path, class, file, line and code."""
    paths = {id(module): name for name, module in model.named_modules()}
    owners = [frame.f_locals.get("self") for frame in reversed(frames)]
    owner = next((item for item in owners if id(item) in paths and isinstance(item, nn.Module)), None)
    path = None if owner is None else paths[id(owner)]
    title = title_of(model, path or "")
    if last is None:
        return path, title
    frame, line = last
    return path, f"{title}, {with_code(f'{frame.f_code.co_filename}:{line}')}"


def first_difference(
    run: Callable[[], Any], prepare: Callable[[], None] = lambda: None, ignored: Sequence[Tensor] = ()
) -> str | None:
    """The line whose result differs first when `run`, which seeds what it does, is called twice; None if none does.

    `prepare` is called before each; what it computes does not count, nor do results that are one of the `ignored`.
    """
    results = []
    for _ in range(2):
        prepare()
        with _Results(ignored) as mode:
            run()
        results.append(mode.found)
    for one, other in zip_longest(*results):
        if one is None or other is None or one[0] != other[0] or not same(one[1], other[1]):
            where: str = (one or other)[0]
            return where
    return None


class _Results(TorchFunctionMode):
    """Keeps the results of all calls of torch's functions, but `ignored` tensors, with the lines that made them."""

    def __init__(self, ignored: Sequence[Tensor]) -> None:
        super().__init__()
        self._ignored = {id(tensor) for tensor in ignored}
        self.found: list[tuple[str, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        where = current_line()
        made = [tensor for tensor in tensors_in(result) if id(tensor) not in self._ignored]
        self.found += [(where, tensor.detach().clone()) for tensor in made]
        return result
