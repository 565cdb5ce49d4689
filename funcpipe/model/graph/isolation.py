"""Context managers that run a user's model without side effects on it or on the process's random number generators.

Code that tries something of the user's, pickles or loads code does so `in_turn`.
"""

import contextlib
import functools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import CellType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from funcpipe.errors import InputError
from funcpipe.model.draws import GENERATORS, SHARED_GENERATORS
from funcpipe.model.graph.reachable import is_empty_cell, reachable, user_classes
from funcpipe.model.tensors import fingerprint, same

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")

_MORE_TRIES = 2


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
    """The dictionaries of hooks of `parameter`: those of its gradient, and those that run once it has that."""
    return [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]


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


class Snapshot:
    """The present contents of all that is reachable from a module or another `root`: `restore` puts them back."""

    def __init__(self, root: Any) -> None:
        modules = list(root.modules()) if isinstance(root, nn.Module) else [root]
        self._seen: dict[int, Any] = {}  # keeps the objects, so that no id comes twice
        self._undo: list[Callable[[], None]] = []
        self._keep(modules)
        for kind in {kind for module in modules for kind in user_classes(module)}:
            self._keep_class(kind)

    def restore(self) -> None:
        """Give everything the contents that it had."""
        with torch.no_grad():
            for undo in self._undo:
                undo()

    def _keep(self, roots: Iterable[Any], depth: int = 0) -> None:
        for value in reachable(roots, self._seen, depth):
            undo = _undo(value)
            if undo is not None:
                self._undo.append(undo)

    def _keep_class(self, kind: type) -> None:
        kept = dict(vars(kind))
        self._undo.append(functools.partial(_restore_class, kind, kept))
        for item in kept.values():
            if isinstance(item, dict | list | set | deque):
                self._keep([item], 1)


def _undo(value: Any) -> Callable[[], None] | None:
    """A function that puts the present contents of `value` back into it; None if it has none of its own."""
    if isinstance(value, OrderedDict):
        return functools.partial(_restore_items, OrderedDict, value, list(value.items()))
    if isinstance(value, dict):
        return functools.partial(_restore_items, dict, value, list(dict.items(value)))
    if isinstance(value, list):
        return functools.partial(list.__setitem__, value, slice(None), list(value))
    if isinstance(value, set):
        return functools.partial(_restore_members, set.clear, set.update, value, list(value))
    if isinstance(value, deque):
        return functools.partial(_restore_members, deque.clear, deque.extend, value, list(value))
    if isinstance(value, CellType) and not is_empty_cell(value):
        return functools.partial(setattr, value, "cell_contents", value.cell_contents)
    if isinstance(value, bytearray):
        return functools.partial(value.__setitem__, slice(None), bytes(value))
    if isinstance(value, np.ndarray) and value.flags.writeable:
        return functools.partial(np.copyto, value, value.copy())
    if isinstance(value, Tensor):
        return functools.partial(_restore_tensor, value, value.detach().clone())
    return None


def _restore_items(kind: Any, value: Any, items: list[tuple[Any, Any]]) -> None:
    if dict.__len__(value) == len(items) and all(
        a is c and b is d for (a, b), (c, d) in (zip(kind.items(value), items, strict=True) if items else ())
    ):
        return
    kind.clear(value)
    for key, item in items:
        kind.__setitem__(value, key, item)


def _restore_members(clear: Callable[[Any], None], add: Callable[[Any, Any], None], value: Any, items: Any) -> None:
    clear(value)
    add(value, items)


def _restore_tensor(tensor: Tensor, old: Tensor) -> None:
    if tensor.shape != old.shape or tensor.dtype != old.dtype:
        tensor.data = old
    elif fingerprint(tensor) is not None:
        if not same(tensor, old):
            tensor.detach().copy_(old)
    elif tensor.layout is not torch.strided or not torch.equal(tensor, old):
        tensor.detach().copy_(old)


def _restore_class(kind: type, kept: dict[str, Any]) -> None:
    for name in vars(kind).keys() - kept.keys():
        delattr(kind, name)
    for name, item in kept.items():
        if vars(kind).get(name) is not item:
            setattr(kind, name, item)
