"""What users leave out or pass in another form, brought into the one form that training uses.

A loss that the module computes itself, a dataset in place of a factory, and the kind of an optimiser.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core import OptimizerKind
from funcpipe.errors import DataError
from funcpipe.training.data import MapDataset
from funcpipe.training.passes import LossFunction
from funcpipe.training.stage_optimizer import OptimizerFactory


def call_arguments(inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments that a module is called with."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return ((inputs,) if isinstance(inputs, Tensor) else tuple(inputs)), {}


def loss_of_output(output: Any, _: Any) -> Tensor:
    """The loss that a module computed itself: the attribute or item `loss` of its output. Raises DataError."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise DataError(f"the module's output, a {type(output).__name__}, holds no loss; give a loss_fn")
    return loss


class LossWithTarget:
    """A loss function bound to one target; unlike a closure, it can be pickled and sent to functions."""

    def __init__(self, loss: LossFunction, target: Any) -> None:
        self._loss = loss
        self._target = target

    def __call__(self, output: Any) -> Tensor:
        """The loss of `output` against the target."""
        return self._loss(output, self._target)


class DatasetFactory:
    """A factory that returns the dataset that it was given."""

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset

    def __call__(self) -> MapDataset:
        """The dataset."""
        return self._dataset


def optimizer_kind(factory: OptimizerFactory) -> OptimizerKind:
    """The kind of optimiser by how many values it keeps per parameter, found by taking one step with it."""
    parameter = nn.Parameter(torch.zeros(2, 3))
    optimizer = factory([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    count = sum(value.shape == parameter.shape for value in tensors)
    return min(OptimizerKind, key=lambda kind: (kind.values_per_parameter < count, kind.values_per_parameter))
