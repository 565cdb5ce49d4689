"""The norm of the whole model's gradient, and what depends on it: gradient clipping, loss scaling, skipped steps.

Every stage sends the sum of its squared gradients to all others. The norm is the root of the sum over stages, so every
worker computes the same norm and decides the same.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from funcpipe.core import OnNan
from funcpipe.errors import NotFinite

GROWTH_STEPS = 2000
"""Steps without an overflow after which the loss scale doubles, as in torch.amp.GradScaler."""

_LEAST_FACTOR = 2.0**-14
"""A loss scale below this has followed thirty overflows in a row: the gradient is not finite at any scale."""

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds it to the norm


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor that the loss is multiplied by, so that small gradients survive 16-bit floats (torch.amp.GradScaler).

    `good_steps` counts the steps without overflow since the factor last changed.
    """

    factor: float = 2.0**16
    good_steps: int = 0

    def after(self, *, finite: bool) -> "LossScale":
        """Return the next step's scale: half after an overflow, double after `GROWTH_STEPS` steps without one."""
        if not finite:
            return LossScale(self.factor / 2)
        if self.good_steps + 1 == GROWTH_STEPS:
            return LossScale(self.factor * 2)
        return LossScale(self.factor, self.good_steps + 1)


class GradientNorm:
    """Collects the squared gradients of all stages in one worker, step by step, and derives the gradients' factor.

    Unless gradients are clipped, the loss is scaled, steps that are not finite are left out, or the loss is `weighted`,
    nothing depends on the norm, and it is not measured. The sum of weights comes with the last stage's norm. `skipped`
    says whether the last step was not taken, because its norm was not finite.
    """

    def __init__(
        self,
        *,
        clip_grad_norm: float | None = None,
        loss_scale: LossScale | None = None,
        on_nan: OnNan = OnNan.IGNORE,
        weighted: bool = False,
    ) -> None:
        self._clip_grad_norm = clip_grad_norm
        self._on_nan = on_nan
        self._weighted = weighted
        self.weight: float | None = None
        self.skipped = False
        self._squares: dict[int, float] = {}
        self.loss_scale = loss_scale

    @property
    def is_needed(self) -> bool:
        """True if anything depends on the norm."""
        clips = self._clip_grad_norm is not None
        return clips or self.loss_scale is not None or self._on_nan is OnNan.SKIP or self._weighted

    @property
    def loss_factor(self) -> float:
        """The factor of this step's loss."""
        return 1.0 if self.loss_scale is None else self.loss_scale.factor

    def add_stage(self, stage: int, squares: float) -> None:
        """Record the sum of the squares of a stage's scaled gradients."""
        self._squares[stage] = squares

    def add_weight(self, weight: float) -> None:
        """Record the weight of the step's loss, for each of its samples, by which gradients are to be divided."""
        self.weight = weight

    def squares(self, stage: int) -> float:
        """Return the recorded squares of a stage."""
        return self._squares[stage]

    @property
    def not_finite(self) -> tuple[int, ...]:
        """The stages whose gradients of this step are not finite, as far as norms are measured."""
        return tuple(stage for stage, squares in sorted(self._squares.items()) if not math.isfinite(squares))

    def finish_step(self) -> float | None:
        """Return the factor for the step's gradients; None if they are not finite and the step must be skipped.

        Raises NotFinite if that is to end the run, and no loss scale makes them finite.
        """
        squares, self._squares = self._squares, {}
        unscale = self._per_weight() / self.loss_factor
        norm = math.sqrt(_sum(squares.values())) * unscale if _finite(squares.values()) else math.nan
        finite = math.isfinite(norm)
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(finite=finite)
            if self.loss_scale.factor < _LEAST_FACTOR and self._on_nan is OnNan.STOP:
                raise NotFinite(
                    f"the gradient is not finite even with a loss scale of {self.loss_scale.factor * 2:.1g}"
                )
        self.skipped = not finite and (self.loss_scale is not None or self._on_nan is OnNan.SKIP)
        if self.skipped:
            return None
        if self._clip_grad_norm is None:
            return unscale
        clip = self._clip_grad_norm / (norm + _EPSILON)
        return unscale * (1.0 if clip > 1 else clip)

    def _per_weight(self) -> float:
        """Return the factor of the gradients of a weighted loss."""
        weight, self.weight = self.weight, None
        if not self._weighted:
            return 1.0
        assert weight is not None, "the last stage tells the weight before the step ends"
        if not weight and self._on_nan is OnNan.STOP:
            raise NotFinite("the weights of all losses of the step add up to 0, so that it has no loss")
        return 1.0 / weight if weight else math.nan


def sum_of_squares(tensors: Iterable[Tensor | None]) -> float:
    """Return the sum of the squares of all elements, computed in double precision; None stands for no gradient."""
    present = [as_real(tensor) for tensor in tensors if tensor is not None]
    norms = [float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in present]
    return _sum(norm * norm for norm in norms)


def as_real(tensor: Tensor) -> Tensor:
    """Return `tensor`, a complex one with its real and imaginary parts as the last dimension."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _sum(values: Iterable[float]) -> float:
    """Return the sum of `values`, none of which is negative; infinity where it is too large for a float."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


def _finite(values: Iterable[float]) -> bool:
    return all(map(math.isfinite, values))
