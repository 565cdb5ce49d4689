"""The gradients of parameters that several stages hold.

Each holder adds its own to what the later holders have added up; the first holder's sum replaces everyone's. The copies
start equal and get the same updates, so they stay equal.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from funcpipe.core import TieRoute


class TiedParameters:
    """The tied parameters of one stage by the name that all their holders know them by."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], routes: Sequence[TieRoute], stage: int) -> None:
        self._parameters = dict(parameters)
        self._borrowed = {name for route in routes if stage in route.stages[1:] for name in route.parameters}
        self._received: list[Mapping[str, Tensor]] = []
        self._sums: dict[str, Tensor] = {}

    def is_borrowed(self, parameter: nn.Parameter) -> bool:
        """Whether an earlier stage holds `parameter` as well, and sums its gradient over the replicas."""
        return any(self._parameters[name] is parameter for name in self._borrowed)

    def receive(self, gradients: Mapping[str, Tensor]) -> None:
        """Keep what the later holders have added up, until `add`."""
        self._received.append(gradients)

    def add(self) -> None:
        """Add what was received to the own gradients."""
        for gradients in self._received:
            for name, gradient in gradients.items():
                parameter = self._parameters[name]
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._received = []

    def gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The gradients so far; a parameter that the loss does not depend on is left out."""
        found = {name: self._parameters[name].grad for name in names}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter that all holders know by `name`."""
        return self._parameters[name]

    def receive_sums(self, gradients: Mapping[str, Tensor]) -> None:
        """Keep the gradients of the whole global batch, until `finish`."""
        self._sums.update(gradients)

    def finish(self) -> None:
        """Give the borrowed parameters the gradients of the whole global batch."""
        for name in self._borrowed:
            self._parameters[name].grad = self._sums.get(name)
        self._sums = {}
