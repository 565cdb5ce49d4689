"""What belongs to an installed package, which functions have, and what is a user's own code, which is sent to them."""

import importlib.metadata
import os
import site
import sys
import sysconfig
from functools import cache
from pathlib import Path

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


@cache  # thousands of modules are looked at for every stage
def is_installed(file: str) -> bool:
    """Whether `file` belongs to the standard library or to a package that is installed, wherever it lies.

    A package that is installed in a folder of its own, as by `pip install --target`, tells so by its metadata there.
    One that is installed to be edited, or lies on the path without metadata, is the user's own.
    """
    path = os.path.realpath(file)
    if is_standard(file) or _is_below(path, _SITES):
        return True
    folders = {os.path.realpath(folder or os.getcwd()) for folder in sys.path}
    entry = next((str(folder) for folder in Path(path).parents if str(folder) in folders), None)
    return entry is not None and _top(os.path.relpath(path, entry)) in _installed_at(entry)


@cache
def is_standard(file: str) -> bool:
    """Whether `file` belongs to the standard library."""
    path = os.path.realpath(file)
    return _is_below(path, _STANDARD) and not _is_below(path, _SITES)


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
