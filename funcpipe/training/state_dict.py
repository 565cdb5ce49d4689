"""Tensors by name that are read when they are asked for."""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

Read = Callable[[], Tensor]
"""What reads a tensor."""


class StateDict(Mapping[str, Tensor]):
    """Tensors by name; those that are in storage are read each time they are asked for, and not kept.

    It is pickled, and so saved by `torch.save`, as a dictionary of all of them.
    """

    def __init__(self, places: Mapping[str, Tensor | Read]) -> None:
        """`places` has each tensor, or what reads it; those of another StateDict are not read."""
        self._places: dict[str, Tensor | Read] = dict(places._places if isinstance(places, StateDict) else places)

    def __getitem__(self, name: str) -> Tensor:
        found = self._places[name]
        return found if isinstance(found, Tensor) else found()

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self)} tensors"

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())  # which torch.load takes with weights_only

    def replaced(self, places: Mapping[str, Tensor | Read]) -> "StateDict":
        """Return the same with other tensors under the names that `places` has."""
        return StateDict({**self._places, **StateDict(places)._places})

    def renamed(self, names: Mapping[str, str]) -> "StateDict":
        """Return the tensors that `names` has, which maps each new name to the present one."""
        return StateDict({new: self._places[name] for new, name in names.items()})


def renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> Mapping[str, Tensor]:
    """Return the same of any `tensors`; those of a StateDict are not read."""
    if isinstance(tensors, StateDict):
        return tensors.renamed(names)
    return {new: tensors[name] for new, name in names.items()}


def united(parts: Iterable[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Return the tensors of all `parts`, of those with one name the last; none is read if any part is a StateDict."""
    parts = list(parts)
    if any(isinstance(part, StateDict) for part in parts):
        return functools.reduce(StateDict.replaced, parts, StateDict({}))
    return {name: tensor for part in parts for name, tensor in part.items()}
