"""The files that a command writes."""

import os
from collections.abc import Callable, Iterable

from funcpipe.errors import InputError


def check_writable(paths: Iterable[str | None]) -> None:
    """Raise InputError, before any work is done, for a path that could not be written after it."""
    for path in paths:
        if path is None:
            continue
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise InputError(f"{path} cannot be written: there is no folder {folder}")
        if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise InputError(f"{path} cannot be written: choose another place")


def write_file(write_to: Callable[[str], object], path: str) -> None:
    """Let `write_to` write the file `path`; raises InputError where it cannot."""
    try:
        write_to(path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError
        raise InputError(f"{path} cannot be written: {error}") from error
