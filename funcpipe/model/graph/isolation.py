"""Context managers that run a user's model without side effects on it or on the process's random number generators."""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

GENERATORS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "numpy": (np.random.get_state, np.random.set_state),
    "random": (random.getstate, random.setstate),
}
"""The global random number generators: how to read and how to set their states."""


def generator_states(names: Iterable[str] = tuple(GENERATORS)) -> dict[str, int]:
    """A hash of each generator's state, which changes with every draw."""
    found = {}
    for name in names:
        state = GENERATORS[name][0]()
        if name == "torch":
            state = state.numpy().tobytes()
        elif name == "numpy":
            state = (state[1].tobytes(), *state[2:])
        found[name] = hash(state)
    return found


@contextlib.contextmanager
def preserve_state(module: nn.Module) -> Iterator[None]:
    """Restore the attributes and buffers of `module`, and the random number generators, at the end."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    attributes = [(namespace, dict(namespace)) for part in module.modules() for namespace in _namespaces(part)]
    states = {name: read() for name, (read, _) in GENERATORS.items()}
    try:
        yield
    finally:
        for namespace, items in attributes:
            namespace.clear()
            namespace.update(items)
        with torch.no_grad():
            for buffer, old in buffers:
                buffer.copy_(old)
        for name, (_, write) in GENERATORS.items():
            write(states[name])


def _namespaces(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return vars(module), module._buffers, module._parameters, module._modules


@contextlib.contextmanager
def preserve_gradients(module: nn.Module) -> Iterator[None]:
    """Put the gradients of `module` aside, and restore them at the end."""
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextlib.contextmanager
def without_saved_tensors() -> Iterator[None]:
    """Turn gradients on, which tells what requires one, but save no tensors for a backward pass."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        yield


@contextlib.contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in training mode, and turn `use_cache` off in its configurations: caches serve generation only.

    If the model is in training mode already, modules that the user put in eval mode stay in it.
    """
    modes = {} if model.training else {module: module.training for module in model.modules()}
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    with_cache = [config for config in configs if getattr(config, "use_cache", None) is True]
    if modes:
        model.train()
    for config in with_cache:
        config.use_cache = False
    try:
        yield
    finally:
        for config in with_cache:
            config.use_cache = True
        for module, mode in modes.items():
            module.training = mode
