"""The norm of the whole model's gradient, and what follows from it: clipping, loss scaling, steps left out.

Every worker hears the squared norms of all stages and draws the same conclusions from them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

GROWTH_STEPS = 2000
"""After so many steps without an overflow the loss is scaled by twice as much."""

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds it to the norm


@dataclass(frozen=True, slots=True)
class LossScale:
    """What the loss is multiplied by, so that small gradients survive 16-bit floats (as torch.amp.GradScaler does).

    `good_steps` counts those since the factor last changed.
    """

    factor: float = 2.0**16
    good_steps: int = 0

    def after(self, *, finite: bool) -> "LossScale":
        """The scale of the next step: half after an overflow, double after `GROWTH_STEPS` without one."""
        if not finite:
            return LossScale(self.factor / 2)
        if self.good_steps + 1 == GROWTH_STEPS:
            return LossScale(self.factor * 2)
        return LossScale(self.factor, self.good_steps + 1)


class GradientNorm:
    """The norm of one worker's steps, by the squares of all stages.

    Without clipping and loss scale nothing depends on it, and nobody measures it.
    """

    def __init__(self, *, clip_grad_norm: float | None = None, loss_scale: LossScale | None = None) -> None:
        self._clip_grad_norm = clip_grad_norm
        self._squares: dict[int, float] = {}
        self.loss_scale = loss_scale

    @property
    def decides(self) -> bool:
        """Whether anything depends on the norm."""
        return self._clip_grad_norm is not None or self.loss_scale is not None

    @property
    def loss_factor(self) -> float:
        """What the loss of this step is multiplied by."""
        return 1.0 if self.loss_scale is None else self.loss_scale.factor

    def keep(self, stage: int, squares: float) -> None:
        """Note the sum of the squares of a stage's scaled gradients."""
        self._squares[stage] = squares

    def squares(self, stage: int) -> float:
        """What was noted of a stage."""
        return self._squares[stage]

    def finish(self) -> float | None:
        """What the gradients are to be multiplied by; None if an overflow has spoiled them."""
        squares, self._squares = self._squares, {}
        unscale = 1.0 / self.loss_factor
        norm = math.sqrt(math.fsum(squares.values())) * unscale if _finite(squares.values()) else math.nan
        if self.loss_scale is not None:
            finite = math.isfinite(norm)
            self.loss_scale = self.loss_scale.after(finite=finite)
            if not finite:
                return None
        if self._clip_grad_norm is None:
            return unscale
        clip = self._clip_grad_norm / (norm + _EPSILON)
        return unscale * (1.0 if clip > 1 else clip)


def sum_of_squares(tensors: Iterable[Tensor | None]) -> float:
    """In double precision, whatever the tensors' own."""
    present = [tensor for tensor in tensors if tensor is not None]
    norms = [float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in present]
    return math.fsum(norm * norm for norm in norms)


def _finite(values: Iterable[float]) -> bool:
    return all(map(math.isfinite, values))
