"""`int` and `float` of a tensor's contents, recorded by symbolic tracing.

Python's own must return a number, which a symbolic value does not have: `torch.zeros(int(graph.max()) + 1, 8)`. So
where code calls them on a symbolic value, its module gets others, under the same names, while it is traced. Code that
branches or loops on the result cannot be traced.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.fx
from torch.fx.proxy import TraceError


class ContentsAsked(TraceError):
    """Code has called int() or float() on a symbolic value; `code` are the globals of its module."""

    def __init__(self, code: dict[str, Any], reason: str) -> None:
        super().__init__(reason)
        self.code = code


class _NumberType(type):
    """Stands for the type `number` wherever code asks about types."""

    number: type

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.number)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.number)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.number, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """The number, or a node for it."""
        if args and isinstance(args[0], torch.fx.Proxy):
            return args[0].tracer.create_proxy("call_function", cls.number, args, kwargs)
        return cls.number(*args, **kwargs)


class _Int(metaclass=_NumberType):
    number = int


class _Float(metaclass=_NumberType):
    number = float


@contextlib.contextmanager
def numbers_recorded(modules: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Give these modules, as their globals, an int and a float that take symbolic values."""
    changed = [(code, name) for code in modules for name in ("int", "float") if name not in code]
    for code, name in changed:
        code[name] = {"int": _Int, "float": _Float}[name]
    try:
        yield
    finally:
        for code, name in changed:
            del code[name]
