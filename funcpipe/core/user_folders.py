"""The user's folders in which programs keep what lasts (XDG base directories), and the one for what does not."""

import os
import tempfile
from pathlib import Path

from funcpipe.errors import InputError


def state_folder() -> Path:
    """Return funcpipe's folder where the user's programs keep their state; raises OSError if the user has no home."""
    return _folder("XDG_STATE_HOME", "~/.local/state")


def data_folder() -> Path:
    """Return funcpipe's folder where the user's programs keep their data; raises OSError if the user has no home."""
    return _folder("XDG_DATA_HOME", "~/.local/share")


def temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    """Make a folder that lasts as long as a context. Raises InputError where none can be made."""
    try:
        return tempfile.TemporaryDirectory(prefix="funcpipe-")
    except OSError as error:
        raise InputError(f"no temporary folder can be made: {error}; set TMPDIR to one that can be written") from error


def _folder(variable: str, otherwise: str) -> Path:
    try:
        return Path(os.environ.get(variable) or otherwise).expanduser() / "funcpipe"
    except RuntimeError as error:  # this user number has no entry, as in many a container
        raise FileNotFoundError(f"this user has no home folder, and neither $HOME nor ${variable} names one") from error
