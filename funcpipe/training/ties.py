"""The gradients of tied parameters, which several stages hold.

Partial sums travel from the last holder to the first: each adds its own gradient to those of the later holders. The
first holder's stage then sums over replicas and sends the result to all other holders. The copies start equal and get
the same updates, so they stay equal.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from funcpipe.core import TieRoute


class TiedParameters:
    """The tied parameters of one stage, by the common name that all their holders use."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], routes: Sequence[TieRoute], stage: int) -> None:
        self._parameters = dict(parameters)
        self._borrowed = {name for route in routes if stage in route.stages[1:] for name in route.parameters}
        self._received: list[Mapping[str, Tensor]] = []
        self._sums: dict[str, Tensor] = {}

    def is_borrowed(self, parameter: nn.Parameter) -> bool:
        """Return True if an earlier stage holds `parameter` too, and so sums its gradient over the replicas."""
        return any(self._parameters[name] is parameter for name in self._borrowed)

    def receive(self, gradients: Mapping[str, Tensor]) -> None:
        """Keep a later holder's partial sums until `add_received`."""
        self._received.append(gradients)

    def add_received(self) -> None:
        """Add the received partial sums to this stage's own gradients."""
        for gradients in self._received:
            for name, gradient in gradients.items():
                parameter = self._parameters[name]
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._received = []

    def gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the partial sums so far; a parameter that the loss does not depend on is left out."""
        found = {name: self._parameters[name].grad for name in names}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def replace(self, gradients: Mapping[str, Tensor]) -> None:
        """Set this stage's gradients to what it has sent to others before."""
        for name, gradient in gradients.items():
            self._parameters[name].grad = gradient

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter with the common name `name`."""
        return self._parameters[name]

    def receive_sums(self, gradients: Mapping[str, Tensor]) -> None:
        """Keep the gradients of the whole global batch until `finish_step`."""
        self._sums.update(gradients)

    def finish_step(self) -> None:
        """Give the borrowed parameters the gradients of the whole global batch."""
        for name in self._borrowed:
            self._parameters[name].grad = self._sums.get(name)
        self._sums = {}
