"""Random numbers that depend on no cut: every call that draws them seeds the generators itself.

A seed is a function of run, step, micro-batch and the name of the draw, never of the plan. A module that is one node of
the graph is seeded when it is called, under its path: "drop", then "drop#2" for its second call. Draws outside such
modules are numbered through the forward, "draw 1", "draw 2", and so on: one for each of torch's own operators that
draws. So a call that draws twice has the same numbers as the two operators that it consists of, and a traced model
draws what the plain one does.

The generators belong to the whole process, and functions load samples while they compute. So code that draws takes them
from `SHARED_GENERATORS`, seeds them, draws, and gives them back; it never relies on the state in which it finds them.
"""

import contextlib
import hashlib
import os
import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from funcpipe.errors import ModelError


def layer_seed(seed: int, step: int, micro_batch: int, layer_name: str) -> int:
    """The seed of the random number generators at the start of a layer: the same under any plan and when recomputed."""
    text = f"{seed}/{step}/{micro_batch}/{layer_name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def reseed(seed: int, generators: Collection[str] = ("torch",)) -> None:
    """Seed global generators: "torch" (of the processor, and of an accelerator that is in use), "numpy", "random"."""
    if "torch" in generators:
        torch.default_generator.manual_seed(seed)
        if (accelerator := _accelerator()) is not None:
            accelerator.manual_seed_all(seed)
    if "numpy" in generators:
        np.random.seed(seed % 2**32)
    if "random" in generators:
        random.seed(seed)


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


class Generators:
    """Gives the process's random number generators to one thread at a time; computing goes before loading.

    Computing waits for no more than the sample that is being loaded. A thread that has them may take them again.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._owner: int | None = None
        self._computing = 0  # threads that wait to compute

    @property
    def are_held(self) -> bool:
        """Return whether this thread has them."""
        return self._owner == threading.get_ident()

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Take the generators for a computation."""
        return self._taken(computes=True)

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Take the generators to load one sample, once no computation wants them."""
        return self._taken(computes=False)

    @contextlib.contextmanager
    def _taken(self, *, computes: bool) -> Iterator[None]:
        if self.are_held:
            yield
            return
        try:
            with self._free:
                self._computing += computes
                try:
                    self._free.wait_for(lambda: self._owner is None and (computes or not self._computing))
                finally:
                    self._computing -= computes
                self._owner = threading.get_ident()
            yield
        finally:  # a thread that was interrupted while it waited has nothing to give, but no other may wait for it
            with self._free:
                if self.are_held:
                    self._owner = None
                self._free.notify_all()

    def forget(self) -> None:
        """Begin anew, in a forked process, which has none of the threads that had or wanted the generators."""
        self._free = threading.Condition()
        self._owner, self._computing = None, 0


SHARED_GENERATORS = Generators()
"""The generators of this process."""

os.register_at_fork(after_in_child=SHARED_GENERATORS.forget)


@dataclass(frozen=True, slots=True)
class Draws:
    """The names of a call's draws, one for a module, and the generators that are seeded for them."""

    names: tuple[str, ...]
    generators: frozenset[str]

    @contextlib.contextmanager
    def seeded(self, seed: tuple[int, int, int]) -> Iterator[None]:
        """Have the call draw its own random numbers in this context; `seed` is that of run, step and micro-batch."""
        with SHARED_GENERATORS.computing():
            if len(self.names) > 1:
                with _SeededOperators(seed, self.names):
                    yield
            else:
                reseed(layer_seed(*seed, self.names[0]), self.generators)
                yield


def is_from_torch(module: nn.Module) -> bool:
    """Return whether all code of `module` is torch's, which always draws from the same generators."""
    return all(type(part).__module__.startswith("torch.nn") for part in module.modules())


def module_draw(path: str, number: int) -> str:
    """The name of what a module draws in its call `number`, counted from 1."""
    return path if number == 1 else f"{path}#{number}"


def operator_draw(number: int) -> str:
    """The name of draw `number` outside of modules that are one node, counted from 1."""
    return f"draw {number}"


_BY_DATA = ("rrelu", "poisson", "binomial", "randperm")
"""Parts of the names of operators that draw as many numbers as their data asks for, and none for some."""


def draws_by_data(target: Any) -> bool:
    """Return whether a function, by its name, may draw for some data and not for others."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return any(word in name for word in _BY_DATA)


def _accelerator() -> Any:
    """Return torch's module of the accelerator that this process uses; None if it uses none."""
    device = torch.accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    return module if module is not None and module.is_initialized() else None


def _drawn_from() -> list[Tensor]:
    """Return the states of torch's generators, which change with every draw."""
    accelerator = _accelerator()
    return [torch.get_rng_state(), *([] if accelerator is None else [accelerator.get_rng_state()])]


class DrawingOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count, while entered, those of torch's operators that draw, or would with other data.

    Subclasses do more: `before` is called ahead of each operator that may draw, `drawn` behind each that did.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler to keep that away from this class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`."""
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **(kwargs or {}))
        self.before()
        states = _drawn_from()
        result = func(*args, **(kwargs or {}))
        if draws_by_data(func) or not all(map(torch.equal, states, _drawn_from())):
            self.drawn()
        return result

    def before(self) -> None:
        """Prepare for an operator that may draw."""

    def drawn(self) -> None:
        """Take note of an operator that has drawn."""
        self.count += 1


class _SeededOperators(DrawingOperators):  # type: ignore[no-untyped-call]
    """Seeds the operators that draw under the given names, one after the other."""

    def __init__(self, seed: tuple[int, int, int], names: Sequence[str]) -> None:
        super().__init__()
        self._seed = seed
        self._names = names

    def before(self) -> None:
        """Seed it. Raises ModelError if the call has drawn as often as it did when the model was traced."""
        if self.count == len(self._names):
            raise ModelError(
                "a call draws more random numbers than it did when the model was traced; "
                "move it into a module and name that among the blocks"
            )
        reseed(layer_seed(*self._seed, self._names[self.count]))
