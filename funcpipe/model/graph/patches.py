"""Patches of torch and Python under which tracers run a user's code.

Code about gradients is refused, which tracers that run on stand-ins for tensors would drop without a word. Gradient
checkpointing just calls the functions that it is given. Symbolic tracing also records torch's functions that make
tensors, where their sizes are symbolic, and `int` and `float` of a symbolic value: `torch.zeros(int(graph.max()) + 1)`.
Python's own must return a number, which such a value does not have. So the module that called them gets others, under
the same names, while it is traced. Code that branches or loops on the result cannot be traced.
"""

import contextlib
import dis
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.fx.proxy import TraceError
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from funcpipe.model.graph.tracers import Unrecordable
from funcpipe.model.tensors import flatten


@contextlib.contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give a class or a module of Python other `attributes` for a while."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def refuse_unrecordable(func: Any, name: str, given: list[Tensor]) -> None:
    """Raise Unrecordable if a call of `func` has effects that no node of a graph can repeat."""
    if name == "__set__" and func.__self__.__name__ != "requires_grad":
        raise Unrecordable(f"an assignment to .{func.__self__.__name__} cannot be recorded")
    if _is_about_gradients(func, name):
        raise Unrecordable(f"{name}() in a forward pass cannot be recorded")
    if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in given):
        raise Unrecordable("transforms of torch.func cannot be recorded")


def _is_about_gradients(func: Any, name: str) -> bool:
    """Return whether a function computes gradients, or changes how they are computed."""
    if name in ("register_hook", "register_post_accumulate_grad_hook", "backward"):
        return True
    return str(getattr(func, "__module__", "")).startswith("torch.autograd") and name in ("grad", "backward")


@contextlib.contextmanager
def gradient_code_refused() -> Iterator[None]:
    """Raise Unrecordable for hooks on tensors, gradients inside a forward pass, and backward passes of the user's."""
    original = vars(Function)["apply"]

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        of_operator = function.__name__.startswith("GeneratedBackwardFor_")  # of torch.library: part of the operator
        if not of_operator and any(isinstance(leaf, _STAND_INS) for leaf in flatten((args, kwargs))[0]):
            raise Unrecordable(f"the backward pass of the Function {function.__name__} would be dropped")
        return original.__get__(None, function)(*args, **kwargs)

    with patched(Function, apply=classmethod(apply)), _Refusing():
        yield


_STAND_INS = (torch.fx.Proxy, torch._subclasses.FakeTensor)


class _Refusing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        refuse_unrecordable(func, name, [leaf for leaf in args if isinstance(leaf, Tensor)])
        return func(*args, **(kwargs or {}))


_NOTE = "gradient checkpointing in the forward pass is left out: the plan's `recompute` decides it for each stage"


@contextlib.contextmanager
def transparent_checkpoints() -> Iterator[set[str]]:
    """Have torch.utils.checkpoint just call the functions that it is given; yield notes: one, if it is used."""
    notes = set[str]()

    def without_reentry(*args: Any, **kwargs: Any) -> Iterator[None]:
        notes.add(_NOTE)
        yield

    def reentrant(cls: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        notes.add(_NOTE)
        return function(*args)

    with (
        patched(checkpoint, _checkpoint_without_reentrant_generator=without_reentry),
        patched(checkpoint.CheckpointFunction, apply=classmethod(reentrant)),
    ):
        yield notes


_FACTORIES = (
    "arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros",
)  # fmt: skip


@contextlib.contextmanager
def factories_recorded(tracer: torch.fx.Tracer) -> Iterator[None]:
    """Record the calls of torch's functions that make tensors of symbolic sizes; torch itself wants Python numbers."""

    def recorded(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, torch.fx.Proxy) for leaf in flatten((args, kwargs))[0]):
                return tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return functools.wraps(function)(call)

    with patched(torch, **{name: recorded(getattr(torch, name)) for name in _FACTORIES}):
        yield


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


def unpacked_names(frame: FrameType) -> int | None:
    """The number of names into which the code of a frame unpacks a value now; None if it does something else."""
    if frame.f_code.co_code[frame.f_lasti] != dis.opmap["UNPACK_SEQUENCE"]:
        return None
    return next(int(one.argval) for one in dis.get_instructions(frame.f_code) if one.offset == frame.f_lasti)


@contextlib.contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Remove the constants that fx adds to the model's attributes while it traces."""
    before = set(vars(model))
    try:
        yield
    finally:
        for name in set(vars(model)) - before:
            if isinstance(vars(model)[name], Tensor):
                delattr(model, name)


@contextlib.contextmanager
def as_if_exporting() -> Iterator[None]:
    """Tell code that asks torch for it that it is exported: many models then take no shortcuts that depend on data."""
    with patched(torch.compiler, _is_compiling_flag=True, _is_exporting_flag=True):
        yield


@contextlib.contextmanager
def without_torch_logs() -> Iterator[None]:
    """Keep torch's own log from the user: tracers try what may fail, and say themselves what has failed."""
    loggers = [logging.getLogger(name) for name in ("torch", *logging.Logger.manager.loggerDict)]
    handlers = [
        handler for logger in loggers if logger.name.partition(".")[0] == "torch" for handler in logger.handlers
    ]

    def reject(record: logging.LogRecord) -> bool:
        return False

    for handler in handlers:
        handler.addFilter(reject)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(reject)
