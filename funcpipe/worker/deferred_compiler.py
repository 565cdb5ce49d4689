"""Defers the import of torch's compiler, which eager training imports but does not use.

Optimisers import `torch._dynamo` only for decorators that the compiler reads, and fake tensors for settings and for the
names of where they come from. It takes nearly as long to import as all the rest of torch, and a third as much memory.
The algebra of symbolic shapes with sympy, which both import as well, takes half a second: every backward with given
gradients asks it whether their shapes are right, and every operator on fake tensors whether anything of it is a symbol.
Torch has no switch for either.

Stand-ins in `sys.modules` do what eager code needs. As soon as anything else is asked of one, or a module that is
imported would keep what is not right for ever, they all give way to the real modules; and what was decorated by then is
decorated by the compiler.
"""

import functools
import importlib
import importlib.util
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ContextDecorator
from functools import reduce
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch._guards import GuardSource, Source
from torch.utils._ordered_set import OrderedSet

_COMPILER = "torch._dynamo"

_SETTINGS = "torch._dynamo.config"

_SOURCES = "torch._dynamo.source"

_SHAPES = "torch.fx.experimental.symbolic_shapes"

_SYMPY = "sympy"


def defer_compiler(*, owned: bool = True) -> None:
    """Put stand-ins into `sys.modules` for those of the modules that are not imported already.

    A process that is not `owned`, but a user's program, may compile what it likes afterwards.
    """
    for name in _OFFERED:
        if _COMPILER not in sys.modules or _is_deferred(_COMPILER):
            sys.modules.setdefault(name, _Deferred(name, owned=owned))


class CompilerDeferred(ContextDecorator):
    """The stand-ins are in `sys.modules` for as long as any context of this kind lasts, in whatever thread.

    Afterwards an import finds the real modules, unless this process has the stand-ins for good.
    """

    _lock = threading.Lock()
    _entered = 0

    def __enter__(self) -> None:
        with self._lock:
            CompilerDeferred._entered += 1
            defer_compiler(owned=False)
            _load_settings()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            CompilerDeferred._entered -= 1
            if not self._entered:
                _remove(name for name in _OFFERED if _is_deferred(name) and not vars(sys.modules[name])["owned"])


def _load_settings() -> None:
    """Import the compiler's settings alone, which fake tensors read: the compiler, once it is there, has the same."""
    path = os.path.join(torch.__path__[0], "_dynamo", "config.py")
    spec = importlib.util.spec_from_file_location(_SETTINGS, path) if _SETTINGS not in sys.modules else None
    if spec is not None and spec.loader is not None:
        sys.modules[_SETTINGS] = settings = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(settings)


def _is_deferred(name: str) -> bool:
    return isinstance(sys.modules.get(name), _Deferred)


def _remove(names: Iterable[str]) -> None:
    for name in tuple(names):
        if _is_deferred(name):
            del sys.modules[name]


class _Deferred(ModuleType):
    """A stand-in for a module: what it offers holds while it stands in `sys.modules`."""

    def __init__(self, name: str, *, owned: bool) -> None:
        super().__init__(name)
        vars(self)["owned"] = owned

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _DUNDERS.get(self.__name__, ()):
            raise AttributeError(name)  # asked for by code that walks `sys.modules`, not by an import
        offered = _OFFERED[self.__name__]
        if name in offered and _is_deferred(self.__name__):
            kept = sys._getframe(1).f_code.co_name == "<module>"
            if not kept or name in _LASTING or vars(self)["owned"]:
                return offered[name]
        if name == "config" and _SETTINGS in sys.modules:
            return sys.modules[_SETTINGS]
        return getattr(_real(self.__name__), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_real(self.__name__), name, value)


def _real(name: str) -> Any:
    if _is_deferred(name):
        _remove(_WITH.get(name, _OFFERED))
    return importlib.import_module(name)


def _graph_break(msg: str = "") -> None:
    """Do nothing: no graph is being compiled."""


def _disable(fn: Any = None, *arguments: Any, **options: Any) -> Any:
    """Return `fn`, which the compiler is kept away from once it is loaded; or a decorator that does the same."""
    if fn is None:
        return lambda decorated: _disable(decorated, *arguments, **options)
    if not isinstance(fn, FunctionType):
        return _real(_COMPILER).disable(fn, *arguments, **options)
    disabled = fn

    @functools.wraps(fn)
    def eager(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        compiler: Any = sys.modules.get(_COMPILER)
        if disabled is fn and not isinstance(compiler, _Deferred) and hasattr(compiler, "disable"):
            disabled = compiler.disable(fn, *arguments, **options)
        return disabled(*args, **kwargs)

    return eager


class _ConstantSource(Source):
    """The name of where a tensor comes from, which is read where sizes are symbols."""

    def __init__(self, source_name: str) -> None:
        self.source_name = source_name

    @property
    def _name_template(self) -> str:
        return self.source_name

    @property
    def guard_source(self) -> GuardSource:
        """None is needed."""
        return GuardSource.CONSTANT


class _RandomValueSource(Source):
    """The source of random values, of which only the compiler makes any."""


def _bindings(shape_env: object, *arguments: Any, **options: Any) -> Any:
    return None if shape_env is None else _real(_SHAPES).compute_unbacked_bindings(shape_env, *arguments, **options)


def _answer(name: str, *arguments: Any) -> Any:
    if all(map(are_numbers, arguments)):
        return OF_NUMBERS[name](*arguments)
    return getattr(_real(_SHAPES), name)(*arguments)


def _same(value: Any) -> Any:
    return value


def _are_equal(one: Any, other: Any) -> bool:
    return bool(one == other)


def _nothing(value: object) -> Iterator[Any]:
    return iter(())


class Symbol:
    """In place of sympy's kind of all symbols: nothing is one."""


class SymbolOfData(Exception):
    """In place of the exception for code that asks for a symbol which depends on data."""


OF_NUMBERS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"), _same),
    **dict.fromkeys(("statically_known_true", "guard_bool", "guard_int"), _same),
    **dict.fromkeys(("guarding_hint_or_throw", "optimization_hint"), _same),
    **dict.fromkeys(("is_symbolic", "is_nested_int", "has_free_unbacked_symbols"), lambda value: False),
    "has_guarding_hint": lambda value: True,
    "free_unbacked_symbols": lambda value: OrderedSet(),
    "_iterate_exprs": _nothing,
    "_iterate_nodes": _nothing,
    "sym_eq": _are_equal,
    "sym_and": lambda *values: reduce(operator.and_, values),
    "sym_or": lambda *values: reduce(operator.or_, values),
}
"""By name, a function for arguments in which everything is a number."""


def are_numbers(value: object) -> bool:
    """Return True if an argument has no symbol in it, nor anything else that the algebra itself must inspect."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            return False
        return are_numbers(value.size()) and are_numbers(value.stride()) and are_numbers(value.storage_offset())
    if type(value) in (tuple, list, torch.Size):
        return all(are_numbers(item) for item in value)  # type: ignore[attr-defined]
    return type(value) in (bool, int, float, str, type(None))


_LASTING = frozenset({*OF_NUMBERS, "compute_unbacked_bindings"})
"""Names that stay right after the real modules are imported."""

_WITH = {_SYMPY: (_SYMPY,), _SHAPES: (_SHAPES, _SYMPY)}
"""The stand-ins that give way together, where it is not all of them: real modules must find those that they import."""

_DUNDERS = {_COMPILER: ("__path__",), _SYMPY: ("__path__", "__version__")}
"""Names that ask for the module itself."""

_OFFERED: Mapping[str, Mapping[str, Any]] = {
    _COMPILER: {"graph_break": _graph_break, "disable": _disable},
    _SOURCES: {"ConstantSource": _ConstantSource, "RandomValueSource": _RandomValueSource},
    _SHAPES: {
        **{name: functools.partial(_answer, name) for name in OF_NUMBERS},
        "compute_unbacked_bindings": _bindings,
        "GuardOnDataDependentSymNode": SymbolOfData,
    },
    _SYMPY: {"Basic": Symbol},
}
"""The names that each stand-in has, by the module that it stands for."""
