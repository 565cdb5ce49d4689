"""Context managers that run a user's model without side effects on it or on the process's random number generators.

Whoever tries something of the user's, and whoever pickles or loads code, does so `in_turn`.
"""

import contextlib
import functools
import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn

from funcpipe.errors import InputError
from funcpipe.model.graph.snapshot import Snapshot
from funcpipe.model.seeds import SHARED_GENERATORS

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")

_MORE_TRIES = 2

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
def in_turn() -> Iterator[None]:
    """Hold what belongs to the whole process, and is changed for a while: one thread at a time, which may nest this.

    That is the random number generators; torch's functions and nn.Module's methods, which tracers replace; modes of
    torch that hold for all threads; warning filters; and cloudpickle's list of modules that it pickles by value.
    """
    with SHARED_GENERATORS.computing():
        yield


def tried_in_turn(function: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
    """`function`, which tries something of the user's, in turn.

    What it refuses is tried again where the program has other threads at work: they may have drawn random numbers, as
    one that makes a model does, and so have changed those that were being compared.
    """

    @functools.wraps(function)
    def tried(*args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        left = 0 if SHARED_GENERATORS.are_held else _MORE_TRIES
        with in_turn():
            while True:
                try:
                    return function(*args, **kwargs)
                except InputError:
                    if not left or not _others_work():
                        raise
                    left -= 1

    return tried


def _others_work() -> bool:
    this, main = threading.current_thread(), threading.main_thread()
    return this is not main or any(other is not this and not other.daemon for other in threading.enumerate())


@contextlib.contextmanager
def preserve_state(root: Any) -> Iterator[None]:
    """Restore, at the end, what a module or another `root` holds besides parameters, and the generators' states."""
    snapshot = Snapshot(root)
    states = {name: read() for name, (read, _) in GENERATORS.items()}
    try:
        yield
    finally:
        snapshot.restore()
        for name, (_, write) in GENERATORS.items():
            write(states[name])


@contextlib.contextmanager
def preserve_gradients(module: nn.Module) -> Iterator[None]:
    """Put the gradients of `module` aside, and the hooks of its parameters, and restore them at the end."""
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    hooks = [(own, dict(own)) for parameter, _ in kept for own in _hooks_of(parameter) if own]
    for parameter, _ in kept:
        parameter.grad = None
    for own, _ in hooks:
        own.clear()
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
        for own, contents in hooks:
            own.update(contents)


def _hooks_of(parameter: nn.Parameter) -> list[dict[int, Any] | None]:
    """What autograd asks for the hooks of `parameter`: those of its gradient, and those that run once it has that."""
    return [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]


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


@contextlib.contextmanager
def as_if_exporting() -> Iterator[None]:
    """Tell code that asks torch for it that it is exported: many models then take no shortcuts that depend on data."""
    flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags


@contextlib.contextmanager
def forward_only(saves_tensors: bool) -> Iterator[None]:
    """Turn gradients on, which tells what requires one, but save no tensors for a backward pass, unless the forward
    needs them itself.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if not saves_tensors:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing))
        yield


@contextlib.contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Turn `use_cache` off in the configurations of the model's modules: caches serve generation only."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    with_cache = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in with_cache:
        config.use_cache = False
    try:
        yield
    finally:
        for config in with_cache:
            config.use_cache = True
