"""Running a user's model without leaving a trace on it, or on the random numbers of the process."""

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
"""The random number generators that code shares, with how to read and how to set their states."""


def positions(names: Iterable[str] = tuple(GENERATORS)) -> dict[str, int]:
    """A fingerprint of each generator's state, which changes whenever something is drawn."""
    found = {}
    for name in names:
        state = GENERATORS[name][0]()
        if name == "torch":
            state = state.numpy().tobytes()
        elif name == "numpy":
            state = (state[1].tobytes(), *state[2:])
        found[name] = hash(state)
    return found


def seed_all(seed: int) -> None:
    """Seed every one of the generators."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Put the attributes and buffers of `module`, and the random number generators, back to what they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    attributes = [(space, dict(space)) for part in module.modules() for space in _spaces(part)]
    states = {name: read() for name, (read, _) in GENERATORS.items()}
    try:
        yield
    finally:
        for space, items in attributes:
            space.clear()
            space.update(items)
        with torch.no_grad():
            for buffer, old in buffers:
                buffer.copy_(old)
        for name, (_, write) in GENERATORS.items():
            write(states[name])


def _spaces(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return vars(module), module._buffers, module._parameters, module._modules


@contextlib.contextmanager
def gradients_kept(module: nn.Module) -> Iterator[None]:
    """Put the gradients that `module` has now aside, and back afterwards."""
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextlib.contextmanager
def nothing_saved() -> Iterator[None]:
    """Compute with gradients on, so that it is known which values need one, but keep nothing for a backward."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        yield


@contextlib.contextmanager
def ready_to_train(model: nn.Module) -> Iterator[None]:
    """Training mode and no caches.

    If the model is in training mode already, modules that the user put in eval mode stay so. `use_cache` in the
    configurations of a model's modules makes it return what only generation needs.
    """
    modes = {} if model.training else {module: module.training for module in model.modules()}
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", None) is True]
    if modes:
        model.train()
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True
        for module, mode in modes.items():
            module.training = mode
