"""Random numbers that depend on no cut: every call that draws them seeds the generators itself.

A module that is one node of the graph is seeded when it is called, under its path: "drop", then "drop#2" for its second
call. Draws outside such modules are numbered through the forward, "draw 1", "draw 2", and so on: one for each of
torch's own operators that draws. So a call that draws twice has the same numbers as the two operators that it consists
of, and a traced model draws what the plain one does.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from funcpipe.errors import ModelError
from funcpipe.model.seeds import SHARED_GENERATORS, layer_seed, reseed


@dataclass(frozen=True, slots=True)
class Draws:
    """What a call draws: the names of its draws, one for a module, and the generators that are seeded for them."""

    names: tuple[str, ...]
    generators: frozenset[str]

    @contextlib.contextmanager
    def seeded(self, seed: tuple[int, int, int]) -> Iterator[None]:
        """Within this context the call draws its own random numbers; `seed` is that of run, step and micro-batch."""
        with SHARED_GENERATORS.computing():
            if len(self.names) > 1:
                with SeededOperators(seed, self.names):
                    yield
            else:
                reseed(layer_seed(*seed, self.names[0]), self.generators)
                yield


def is_from_torch(module: nn.Module) -> bool:
    """Whether all code of `module` is torch's, which always draws from the same generators."""
    return all(type(part).__module__.startswith("torch.nn") for part in module.modules())


def module_draw(path: str, number: int) -> str:
    """The name of what a module draws in its call `number`, counted from 1."""
    return path if number == 1 else f"{path}#{number}"


def operator_draw(number: int) -> str:
    """The name of draw `number` outside of modules that are one node, counted from 1."""
    return f"draw {number}"


_BY_DATA = ("rrelu", "poisson", "binomial", "randperm")
"""What is in the names of operators that draw as many numbers as their data asks for, and none for some."""


def draws_by_data(target: Any) -> bool:
    """Whether a function may draw for some data and not for others, by its name."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return any(word in name for word in _BY_DATA)


class DrawingOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, calls `before` ahead of each of torch's operators that may draw, and `drawn` if it did draw, or
    would have with other data.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler to keep that away from this class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`."""
        if not _may_draw(func):
            return func(*args, **(kwargs or {}))
        self.before()
        state = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if draws_by_data(func) or not torch.equal(state, torch.get_rng_state()):
            self.drawn()
        return result

    def before(self) -> None:
        """An operator that may draw is about to run."""

    def drawn(self) -> None:
        """It has drawn."""


class CountedOperators(DrawingOperators):
    """Counts the operators that draw."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def drawn(self) -> None:
        """Count it."""
        self.count += 1


class SeededOperators(DrawingOperators):
    """Seeds the operators that draw under the given names, one after the other."""

    def __init__(self, seed: tuple[int, int, int], names: Iterable[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._names = list(reversed(list(names)))

    def before(self) -> None:
        """Seed it. Raises ModelError if the call has drawn as often as it did when the model was traced."""
        if not self._names:
            raise ModelError(
                "a call draws more random numbers than it did when the model was traced; "
                "move it into a module and name that among the blocks"
            )
        reseed(layer_seed(*self._seed, self._names[-1]))

    def drawn(self) -> None:
        """Go on to the next name."""
        self._names.pop()


@cache
def _may_draw(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
