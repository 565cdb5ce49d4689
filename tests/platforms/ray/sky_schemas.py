"""SkyPilot's own schemas, from an installation without what it requires.

The package is installed with `--no-deps`, as it pins older versions of what funcpipe uses: it cannot be imported as a
whole. Its schemas can: only those of the fields `autostop` and `config`, which no task here has, need more.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import pytest

_AUTOSTOP = "sky.skylet.autostop_lib"


class _NoModes(Enum):
    """In place of SkyPilot's modes of autostop."""

    @classmethod
    def supported_modes(cls) -> list[str]:
        return []


def load() -> Any:
    """The module with the schemas; skips the test where SkyPilot is not installed."""
    found = importlib.util.find_spec("sky")
    if found is None:
        pytest.skip("SkyPilot is not installed")
    with _modules_as_before():
        package = types.ModuleType("sky")
        vars(package).update(__path__=list(found.submodule_search_locations or ()), __version__="0", __commit__="0")
        autostop = types.ModuleType(_AUTOSTOP)
        vars(autostop)["AutostopWaitFor"] = _NoModes
        sys.modules |= {"sky": package, _AUTOSTOP: autostop}
        schemas = importlib.import_module("sky.utils.schemas")
    vars(schemas)["_task_config_schema"] = lambda: False  # of the field `config`: nothing is admitted there
    return schemas


@contextmanager
def _modules_as_before() -> Iterator[None]:
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sky"]:
            del sys.modules[name]
