"""The installed distribution: its name and version, libraries that are missing, and imports by a wrong name."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from funcpipe.errors import InputError

if TYPE_CHECKING:
    from importlib import metadata


DISTRIBUTION = "funcpipe-torch"
"""The name of the package on the package index; its import name is `funcpipe`."""


_FORMER = "funcpipe"
"""The name that a checkout may still be installed under; on the package index this is an unrelated package."""


def version() -> str:
    """Return the installed version; `0+unknown` where the package is only found on the path."""
    found = _installed()
    return "0+unknown" if found is None else found.version


def requirements() -> tuple[str, ...]:
    """Return the requirements of the installed distribution, extras included, as pip reads them."""
    found = _installed()
    return () if found is None else tuple(found.requires or ())


def _installed() -> "metadata.Distribution | None":
    from importlib import metadata  # which loads what reads mails, needed by two verbs

    for name in (DISTRIBUTION, _FORMER):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found = metadata.distribution(name)
            if any(entry.value == "funcpipe.cli:main" for entry in found.entry_points):
                return found
    return None


def install_command(extra: str) -> str:
    """Return the command that installs the libraries of `extra`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@contextlib.contextmanager
def needed_from(extra: str) -> Iterator[None]:
    """Raise InputError, which says how to install them, if libraries of `extra` cannot be imported in this context."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "funcpipe":
            raise
        raise InputError(f"{error.name} is not installed; run: {install_command(extra)}") from None


def require_full_name(name: str) -> None:
    """Raise ImportError if a package of funcpipe is imported as `name` without `funcpipe.` before it.

    It would be loaded twice, and classes that look the same would differ.
    """
    if not name.startswith("funcpipe."):
        raise ImportError(f"import funcpipe.{name} instead of {name}, which is a link to it")
