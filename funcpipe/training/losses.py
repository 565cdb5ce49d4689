"""Losses in the form in which a stage computes them: of a module that returns its own, under autocast, or weighted.

A weighted loss is a mean over something else than samples: each micro-batch gives its sum, and the weight of that. The
loss of a step is the sum over all micro-batches, divided by the sum of their weights: that of the whole batch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core import Precision, Reduction
from funcpipe.errors import DataError
from funcpipe.model.draws import (
    GENERATORS,
    layer_seed,
    reseed,
)
from funcpipe.model.graph.program import autocast_to
from funcpipe.model.tensors import tensors_in

LossFunction = Callable[[Any, Any], Any]
"""The mean loss over a batch, of the model's output and the target; or, if that is declared, a sum and its weight."""


def seed_loss(seed: int, step: int, micro_batch: int) -> None:
    """Seed the generators for the loss function."""
    reseed(layer_seed(seed, step, micro_batch, "loss"), GENERATORS)


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


def device_of(output: Any) -> str:
    """Return the kind of device that an output of the model lies on, that of its first tensor; tensors without memory
    stand for the processor's.
    """
    return next((tensor.device.type for tensor in tensors_in(output) if not tensor.is_meta), "cpu")


@dataclass(frozen=True)
class CastLoss:
    """A loss function under autocast; unlike a closure, it can be sent to functions."""

    loss: LossFunction
    precision: Precision

    def __call__(self, output: Any, target: Any) -> Any:
        """Return the loss of `output` against `target`."""
        with autocast_to(self.precision, device_of(output)):
            return self.loss(output, target)


IGNORED = -100
"""The target that the losses of torch ignore, unless they are told another."""

_WAY_OUT = "return the sum of the losses of tokens or samples, and how many they are or what they weigh"


@dataclass(frozen=True)
class WeightedLoss:
    """A loss function as its sum over what it is a mean over, and the weight of that; it can be sent to functions."""

    loss: Any
    reduction: Reduction
    precision: Precision = Precision.FP32

    def __call__(self, output: Any, target: Any) -> tuple[Tensor, float]:
        """Return the sum and its weight. Raises DataError for a loss that does not return what was declared."""
        with autocast_to(self.precision, device_of(output)):
            found = self.loss(output, target)
        if self.reduction is Reduction.TOKENS:
            weight = _token_weight(self.loss, target)
            mean = _number(found, "tokens", "return their mean, as torch.nn.functional.cross_entropy does")
            return (mean * weight if weight else torch.zeros_like(mean.detach())), weight
        if not isinstance(found, tuple) or len(found) != 2:
            raise DataError(
                f"the loss function returns a {type(found).__name__}, not (sum, weight), as reduction='weighted' "
                f"says: {_WAY_OUT}; or leave reduction out for a loss that returns a mean over samples"
            )
        total, weight = _number(found[0], "weighted", _WAY_OUT), float(found[1])
        if not (math.isfinite(weight) and weight >= 0):
            raise DataError(f"the loss function returns the weight {weight}; it must be a finite number, not below 0")
        return total, weight


def _token_weight(loss: Any, target: Any) -> float:
    """Return the weight of the targets over which torch's cross_entropy and nll_loss take the mean.

    Their number, without those that `loss` ignores; or the sum of the weights of their classes. Raises DataError for
    targets that are no class indices.
    """
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():
        raise DataError(
            f"with reduction='tokens' the target must be a tensor of class indices, and it is a {_kind(target)}; let "
            f"the loss {_WAY_OUT}, with reduction='weighted'"
        )
    given: dict[str, Any] = {}
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        given = {"ignore_index": loss.ignore_index, "weight": loss.weight}
    elif isinstance(loss, partial):
        given = loss.keywords
    kept = target[target != given.get("ignore_index", IGNORED)]
    weights = given.get("weight")
    return float(kept.numel()) if weights is None else float(weights.detach().double()[kept].sum())


def _number(found: Any, reduction: str, way_out: str) -> Tensor:
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise DataError(
            f"the loss function gives a {_kind(found)}, not one number; with reduction={reduction!r}, {way_out}"
        )
    return found.reshape(())


def _kind(value: Any) -> str:
    return f"{value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
