"""Defers the import of torch's compiler, which eager training imports but does not use.

Optimisers import `torch._dynamo` only for decorators that the compiler reads. It takes nearly as long to import as all
the rest of torch, and a third as much memory. Likewise every backward with given gradients imports the algebra of
symbolic shapes, which takes half a second. Stand-ins in `sys.modules` do what eager code needs of the two; they import
the real module as soon as anything else is asked of them.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_SHAPES = "torch.fx.experimental.symbolic_shapes"


def defer_compiler() -> None:
    """Put the stand-ins into `sys.modules`, unless the compiler is imported already."""
    for name, stand_in in ((_COMPILER, _Compiler), (_SHAPES, _Shapes)):
        if name not in sys.modules:
            sys.modules[name] = stand_in(name)


class _Deferred(ModuleType):
    """A stand-in for a module; imports the real one when asked for anything that it does not have itself."""

    _needed_dunders = frozenset[str]()
    """Dunder names that import statements need; others are asked for by code that walks `sys.modules`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in self._needed_dunders:
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class _Compiler(_Deferred):
    _needed_dunders = frozenset({"__path__"})

    def graph_break(self, msg: str = "") -> None:
        """Does nothing: no graph is being compiled."""

    def disable(self, fn: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
        """`fn` as it is, or a decorator that does the same."""
        return fn if fn is not None else lambda decorated: decorated


class _Shapes(_Deferred):
    def expect_true(self, condition: bool) -> bool:
        """`condition` as it is."""
        return condition

    def sym_eq(self, left: object, right: object) -> bool:
        """Whether two shapes are equal."""
        return left == right
