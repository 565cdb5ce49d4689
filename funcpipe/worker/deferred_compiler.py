"""Torch without its compiler, which eager code loads for marks that only the compiler reads.

`torch._dynamo`, which optimisers load, takes as long as nearly all the rest of torch, and a third as much memory; the
algebra of symbolic shapes, which every backward with given gradients loads, half a second.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_SHAPES = "torch.fx.experimental.symbolic_shapes"


def defer_compiler() -> None:
    """Have torch's compiler loaded when something of it is used that eager code does not use, unless it is there."""
    for name, stand_in in ((_COMPILER, _Compiler), (_SHAPES, _Shapes)):
        if name not in sys.modules:
            sys.modules[name] = stand_in(name)


class _Deferred(ModuleType):
    """Stands in for a module: does what eager code asks of it, and gives way to it for all else."""

    _asked = frozenset[str]()
    """What import statements ask of it, of the names that are read too by whoever looks through all modules."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in self._asked:
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class _Compiler(_Deferred):
    _asked = frozenset({"__path__"})

    def graph_break(self, msg: str = "") -> None:
        """Where a graph that is being compiled is to end: nothing is."""

    def disable(self, fn: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
        """`fn`, not to be compiled: as it is. Without one, what does that to a function that it decorates."""
        return fn if fn is not None else lambda decorated: decorated


class _Shapes(_Deferred):
    def expect_true(self, condition: bool) -> bool:
        """`condition`, which no compiler takes for granted: as it is."""
        return condition

    def sym_eq(self, left: object, right: object) -> bool:
        """Whether two shapes are equal."""
        return left == right
