"""Torch without its compiler, which eager optimisers load for a mark that only the compiler reads.

`torch._dynamo` takes as long to load as nearly all the rest of torch, and a third as much memory.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"


def defer_compiler() -> None:
    """Have torch's compiler loaded when something of it is used that eager code does not use, unless it is there."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _Deferred(_NAME)


class _Deferred(ModuleType):
    """Stands in for the compiler: does what optimisers ask of it in eager code, and gives way to it for all else."""

    def graph_break(self, msg: str = "") -> None:
        """Where a graph that is being compiled is to end: nothing is."""

    def disable(self, fn: Callable[..., Any], recursive: bool = True, *, wrapping: bool = True) -> Callable[..., Any]:
        """`fn`, not to be compiled: as it is."""
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # read by whoever looks through all modules
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)
