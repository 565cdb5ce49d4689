"""Users' models and arguments, with what they leave out or pass in another form, in the one form of training.

A loss that the module computes itself, a dataset in place of a factory, and the kind of an optimiser.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core import OptimizerKind
from funcpipe.errors import DataError
from funcpipe.model.graph.isolation import in_turn
from funcpipe.training.data import MapDataset
from funcpipe.training.optimizer_trial import made_optimizer, small_parameters, take_steps
from funcpipe.training.optimizers import ParameterShape
from funcpipe.training.recipe import LossFunction, OptimizerFactory


def call_arguments(inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments that a module is called with."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return ((inputs,) if isinstance(inputs, Tensor) else tuple(inputs)), {}


def loss_of_output(output: Any, _: Any) -> Tensor:
    """Return the loss that a module computed itself: the attribute or item `loss` of its output. Raises DataError."""
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
        """Return the loss of `output` against the target; of a weighted one, its sum."""
        found = self._loss(output, self._target)
        loss: Tensor = found[0] if isinstance(found, tuple) else found
        return loss


class DatasetFactory:
    """A factory that returns the dataset that it was given."""

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset

    def __call__(self) -> MapDataset:
        """Return the dataset."""
        return self._dataset


@in_turn()
def optimizer_kind(factory: OptimizerFactory, shapes: Sequence[ParameterShape] = ()) -> OptimizerKind:
    """Return the kind of optimiser by how many values it keeps per parameter, found by taking one step with it.

    `shapes` are the parameters of the model; the step is taken with small ones of these names. Raises InputError if
    the optimiser cannot take it.
    """
    named = small_parameters(shapes) or [("weight", nn.Parameter(torch.zeros(2, 3)))]
    optimizer = made_optimizer(factory, named)
    take_steps(optimizer, named, steps=1)
    count = max(_values_of(optimizer, parameter) for _, parameter in named)
    return min(OptimizerKind, key=lambda kind: (kind.values_per_parameter < count, kind.values_per_parameter))


def _values_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    """Return the number of values that the optimiser keeps for each element of `parameter`."""
    kept = optimizer.state.get(parameter, {}).values()
    return sum(isinstance(value, Tensor) and value.shape == parameter.shape for value in kept)
