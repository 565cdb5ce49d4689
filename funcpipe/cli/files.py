"""The files that a command writes.

An output may replace what an earlier command of the same kind wrote, as compilers and converters do. But a document
replaces only a document of its own kind, and no output replaces a file that the command reads: a profile that was
measured in the cloud is not lost by a wrong name after -o.
"""

import argparse
import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable

from funcpipe.errors import InputError

_READ = ("profile", "plan", "spec", "predicted", "files", "requirements", "weights", "loss_model", "provision")
"""The options, in some verb, that name files to read."""

_OUTPUTS: dict[str, dict[str, str]] = {
    "profile": {"output": "profile"},
    "optimize": {"output": "plan", "figure": "", "report": ""},
    "simulate": {"trace": "trace"},
    "provision": {"figure": ""},
    "fit-loss": {"output": ""},
    "train": {"trace": "trace", "output": "", "averaged_output": "", "best": "", "loss_output": ""},
    "predict": {"output": ""},
    "export": {"output": ""},
    "report": {"figure": "", "perfetto": "", "output": ""},
    "platforms": {"output": "platform"},
    "deploy": {"template_only": ""},
}
"""The options of each verb that name files to write, and the kind of document, if it is one."""

_PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".eps", ".ps", ".webp")


def check_outputs(options: argparse.Namespace) -> None:
    """Raise InputError, before any work is done, for a file that could not be written after it, or must not be."""
    given = {name: getattr(options, name, None) for name in _READ}
    named = [path for value in given.values() for path in (value if isinstance(value, list) else [value])]
    inputs = {os.path.realpath(path) for path in named if isinstance(path, str)}
    written: dict[str, str] = {}
    for name, kind in _OUTPUTS.get(options.verb, {}).items():
        path = getattr(options, name)
        if path is None:
            continue
        check_writable([path])
        if name == "figure" and not path.lower().endswith(_PICTURES):
            raise InputError(f"{path} cannot be drawn: its name must end with {', '.join(_PICTURES)}")
        if os.path.realpath(path) in inputs and not (kind and _kind_of(path) == kind):  # which is no input
            raise InputError(f"{path} is read by this command and would be lost: write to another file")
        if os.path.realpath(path) in written:
            raise InputError(f"{path} is named twice as an output: {written[os.path.realpath(path)]} and {name}")
        written[os.path.realpath(path)] = name
        _check_replaced(path, kind)


def write_file(write_to: Callable[[str], object], path: str) -> None:
    """Let `write_to` write the file `path`; raises InputError where it cannot.

    It has the permissions that it had before, or those of any new file of the user: some libraries write files that
    only their owner can read.
    """
    is_new = not os.path.exists(path)
    try:
        if is_new:
            open(path, "ab").close()
        before = os.stat(path)
        write_to(path)
        if stat.S_ISREG(before.st_mode) and os.stat(path).st_mode != before.st_mode:
            os.chmod(path, stat.S_IMODE(before.st_mode))
    except BaseException as error:  # an error, such as nothing to draw, leaves no empty file
        if is_new and not os.path.islink(path):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
        if isinstance(error, OSError | RuntimeError):  # torch.save raises RuntimeError
            raise InputError(f"{path} cannot be written: {error}") from error
        raise


def check_writable(paths: Iterable[str | None]) -> None:
    """Raise InputError, before any work is done, for a path that could not be written after it."""
    for path in paths:
        if path is None:
            continue
        if not path:
            raise InputError("the name of a file to write is empty: name one")
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise InputError(f"{path} cannot be written: there is no folder {folder}")
        if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise InputError(f"{path} cannot be written: choose another place")


def _check_replaced(path: str, kind: str) -> None:
    """Raise InputError if the file that is there is of another kind than `kind`, or none and this is a document."""
    if not os.path.isfile(path) or os.path.getsize(path) == 0:
        return
    there = _kind_of(path)
    if (there or kind) and there != kind:
        is_now = f"a {there} of funcpipe" if there else f"no {kind} of funcpipe"
        raise InputError(
            f"{path} is there already, and is {is_now}: it is not replaced; delete it, or name another file"
        )


def _kind_of(path: str) -> str:
    """The kind of funcpipe document that the file is; empty if it is none."""
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        found = re.match(rb'\s*\{\s*"format":\s*"funcpipe\.([\w-]+)/', file.read(200))
    return found[1].decode() if found else ""
