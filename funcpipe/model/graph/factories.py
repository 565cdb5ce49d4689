"""Torch's functions that make tensors, recorded by symbolic tracing where their sizes are symbolic."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from funcpipe.model.tensors import flatten

_FACTORIES = (
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
)


@contextlib.contextmanager
def factories_recorded(tracer: torch.fx.Tracer) -> Iterator[None]:
    """Record the calls of torch's functions that make tensors of symbolic sizes; torch itself wants Python numbers."""
    own = {name: getattr(torch, name) for name in _FACTORIES}

    def recorded(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, torch.fx.Proxy) for leaf in flatten((args, kwargs))[0]):
                return tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return functools.wraps(function)(call)

    try:
        for name, function in own.items():
            setattr(torch, name, recorded(function))
        yield
    finally:
        for name, function in own.items():
            setattr(torch, name, function)
