"""What users leave out or give in other forms: a loss, a dataset's factory, the kind of an optimiser."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core import OptimizerKind
from funcpipe.errors import DataError
from funcpipe.training.computation import LossFunction, OptimizerFactory
from funcpipe.training.data import MapDataset


def arguments_of(inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with: its inputs by position, and by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return ((inputs,) if isinstance(inputs, Tensor) else tuple(inputs)), {}


def own_loss(output: Any, _: Any) -> Tensor:
    """The loss that a module computed itself: the attribute or the item `loss` of its output."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise DataError(f"the module's output, a {type(output).__name__}, holds no loss; give a loss_fn")
    return loss


class LossOn:
    """A loss against one target, which can be sent to functions without what surrounds it."""

    def __init__(self, loss: LossFunction, target: Any) -> None:
        self._loss = loss
        self._target = target

    def __call__(self, output: Any) -> Tensor:
        """The loss of the module's `output`."""
        return self._loss(output, self._target)


class Holder:
    """A dataset as its own factory."""

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset

    def __call__(self) -> MapDataset:
        """The dataset."""
        return self._dataset


def optimizer_kind(factory: OptimizerFactory) -> OptimizerKind:
    """How many values per parameter the optimiser keeps, found by taking one step with it."""
    parameter = nn.Parameter(torch.zeros(2, 3))
    optimizer = factory([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    count = sum(value.shape == parameter.shape for value in kept)
    return min(OptimizerKind, key=lambda kind: (kind.values_per_parameter < count, kind.values_per_parameter))
