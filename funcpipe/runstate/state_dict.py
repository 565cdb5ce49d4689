"""A `state_dict` whose tensors are read when they are asked for."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


class StateDict(Mapping[str, Tensor]):
    """Tensors by name; those that are in storage are read each time they are asked for, and not kept.

    It is pickled, and so saved by `torch.save`, as a dictionary of all of them.
    """

    def __init__(self, places: "Mapping[str, Tensor | Callable[[], Tensor]]") -> None:
        """`places` has each tensor, or what reads it; those of another StateDict are not read."""
        self._places: dict[str, Tensor | Callable[[], Tensor]] = dict(
            places._places if isinstance(places, StateDict) else places
        )

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

    def replaced(self, places: "Mapping[str, Tensor | Callable[[], Tensor]]") -> "StateDict":
        """Return the same with other tensors under the names that `places` has."""
        return StateDict({**self._places, **StateDict(places)._places})
