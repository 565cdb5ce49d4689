"""Code about gradients, which tracers that run it on stand-ins for tensors would drop without a word."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.fx
from torch import Tensor
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode

from funcpipe.model.graph.eager_calls import refuse_unrecordable
from funcpipe.model.graph.tracers import Unrecordable
from funcpipe.model.tensors import flatten


@contextlib.contextmanager
def gradient_code_refused() -> Iterator[None]:
    """Raise Unrecordable for hooks on tensors, gradients inside a forward pass, and backward passes of the user's."""
    original = vars(Function)["apply"]

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        of_operator = function.__name__.startswith("GeneratedBackwardFor_")  # of torch.library: part of the operator
        if not of_operator and any(isinstance(leaf, _STAND_INS) for leaf in flatten((args, kwargs))[0]):
            raise Unrecordable(f"the backward pass of the Function {function.__name__} would be dropped")
        return original.__get__(None, function)(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        with _Refusing():
            yield
    finally:
        Function.apply = original  # type: ignore[method-assign]


_STAND_INS = (torch.fx.Proxy, torch._subclasses.FakeTensor)


class _Refusing(TorchFunctionMode):
    """Refuses functions that no graph can repeat."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        refuse_unrecordable(func, name, [leaf for leaf in args if isinstance(leaf, Tensor)])
        return func(*args, **(kwargs or {}))
