"""Parameters that several stages hold, and the sums of their gradients.

Parameters that several stages hold are tied: partial sums travel from the last holder to the first, and each adds its
own gradient to those of the later holders. The first holder's stage then sums over replicas and sends the result to all
other holders. The copies start equal and get the same updates, so they stay equal.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from funcpipe.core import TieRoute
from funcpipe.model.split import StageModule
from funcpipe.training.device import HOST, Device


class TiedParameters:
    """The tied parameters of one stage, by the common name that all their holders use."""

    def __init__(self, stage: StageModule, routes: Sequence[TieRoute], number: int, device: Device = HOST) -> None:
        """`number` is that of the stage in `routes`; it is on `device`."""
        self._device = device
        named = dict(stage.named_parameters(remove_duplicate=False))
        self._parameters = {common: named[name] for name, common in stage.shared.items()}
        self._shared = {name for route in routes if number in route.stages for name in route.parameters}
        self._borrowed = {name for route in routes if number in route.stages[1:] for name in route.parameters}
        self._received: list[Mapping[str, Tensor]] = []
        self._sums: dict[str, Tensor] = {}
        self._late: dict[str, Tensor] = {}
        self._computed: Any = None

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that other stages hold too."""
        return tuple(self._parameters[name] for name in self._shared)

    def is_borrowed(self, parameter: nn.Parameter) -> bool:
        """Return True if an earlier stage holds `parameter` too, and so sums its gradient over the replicas."""
        return any(self._parameters[name] is parameter for name in self._borrowed)

    def receive(self, gradients: Mapping[str, Tensor]) -> None:
        """Keep a later holder's partial sums until `add_received`."""
        self._received.append(self._device.receive(gradients))

    def add_received(self) -> None:
        """Add the received partial sums to this stage's own gradients."""
        for gradients in self._received:
            for name, gradient in gradients.items():
                parameter = self._parameters[name]
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._received = []
        self.after_backward()

    def after_backward(self) -> None:
        """Mark where the device has added to the gradients."""
        if self._shared:
            self._computed = self._device.computed()

    def gradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the partial sums so far; a parameter that the loss does not depend on is left out."""
        found = {name: self._parameters[name].grad for name in names}
        present = {name: gradient for name, gradient in found.items() if gradient is not None}
        return self._device.send(present, self._computed)

    def replace(self, gradients: Mapping[str, Tensor]) -> None:
        """Set this stage's gradients to what it has sent to others before."""
        for name, gradient in self._device.receive(gradients).items():
            self._parameters[name].grad = gradient

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter with the common name `name`."""
        return self._parameters[name]

    def receive_sums(self, gradients: Mapping[str, Tensor], *, late: bool = False) -> None:
        """Keep the gradients of the whole global batch until `finish_step`, or what comes `late` until it is taken."""
        (self._late if late else self._sums).update(self._device.receive(gradients))

    def finish_step(self) -> None:
        """Give the borrowed parameters the gradients of the whole global batch."""
        sums = self.take_sums()
        for name in self._borrowed:
            self._parameters[name].grad = sums.get(name)

    def take_sums(self, *, late: bool = False) -> dict[str, Tensor]:
        """Return what `receive_sums` has kept, which is kept no longer."""
        taken = self._late if late else self._sums
        sums = dict(taken)
        taken.clear()
        return sums
