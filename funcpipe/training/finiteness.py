"""Checks that the numbers of a step are finite: the loss in the last stage, gradients and parameters in each."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from funcpipe.core import OnNan
from funcpipe.errors import NotFinite
from funcpipe.training.norms import GradientNorm, as_real


class Finiteness:
    """Watches one replica of stage `stage`, as `on_nan` says; its trainable `parameters` by name.

    Each check reads its tensors once. Parameters that were not finite to begin with are left alone.
    """

    def __init__(self, on_nan: OnNan, stage: int, parameters: Mapping[str, nn.Parameter]) -> None:
        self._on_nan = on_nan
        self._stage = stage
        self._parameters = parameters
        self._before = frozenset(_not_finite(parameters)) if on_nan is not OnNan.IGNORE else frozenset[str]()

    def check_loss(self, loss: float, step: int, micro_batch: int | None = None) -> None:
        """Raise NotFinite if the mean loss of a micro-batch, or of the batch, ends the run; steps count from 0."""
        if self._on_nan is OnNan.STOP and not math.isfinite(loss):
            if micro_batch is None:
                raise NotFinite(f"in step {step + 1} the loss of the batch is {loss}")
            raise NotFinite(f"in step {step + 1} the loss is {loss}, first of micro-batch {micro_batch}")

    def check_gradients(self, norm: GradientNorm, step: int) -> None:
        """Raise NotFinite if the summed gradients of this stage, or of one whose `norm` is known, end the run.

        With a loss scale, gradients that overflow are part of finding it: those steps are skipped.
        """
        if self._on_nan is not OnNan.STOP or norm.loss_scale is not None or (norm.is_needed and not norm.not_finite):
            return
        bad = _not_finite({n: p.grad for n, p in self._parameters.items() if p.grad is not None})
        if bad:
            raise NotFinite(f"in step {step + 1} {self._of(bad, 'gradient')}, begun there or in a later stage")
        if norm.not_finite:
            raise NotFinite(f"in step {step + 1} the gradient of stage {norm.not_finite[-1]} is not finite")

    def check_split(self, summed: Tensor, step: int) -> None:
        """Raise NotFinite if `summed`, the gradients that one replica updates with, end the run."""
        if self._on_nan is OnNan.STOP and not is_finite(summed):
            raise NotFinite(f"in step {step + 1} the gradient of stage {self._stage} is not finite")

    def check_parameters(self, done: int) -> None:
        """Raise NotFinite if parameters are not finite after `done` steps, so that no checkpoint holds such."""
        if self._on_nan is OnNan.IGNORE:
            return
        bad = [name for name in _not_finite(self._parameters) if name not in self._before]
        if bad:
            raise NotFinite(f"after step {done} {self._of(bad, 'value')}, made so by updates with finite gradients")

    def _of(self, bad: list[str], what: str) -> str:
        more = f", and of {len(bad) - 1} more of its parameters" if len(bad) > 1 else ""
        return f"the {what} of {bad[0]} in stage {self._stage}{more} is not finite"


def is_finite(tensor: Tensor) -> bool:
    """Return True if all elements are. Their sum decides it almost always, and needs no memory."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    real = as_real(tensor.detach())
    return math.isfinite(real.sum().item()) or bool(torch.isfinite(real).all())


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not is_finite(tensor)]
