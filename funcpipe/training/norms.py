"""The norm of the whole model's gradient, and what depends on it: clipping, loss scaling, steps that are not finite.

Every stage sends the sum of its squared gradients to all others. The norm is the root of the sum over stages, so every
worker computes the same norm and decides the same. Each checks that the numbers of a step are finite: the loss in the
last stage, gradients and parameters in all.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from funcpipe.core import OnNan
from funcpipe.errors import NotFinite
from funcpipe.training.device import numbers

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
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in present]
    return _sum(norm * norm for norm in numbers(norms))


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
    """Return True if all elements are."""
    return not _not_finite({"": tensor})


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of those that are not. Their sums decide it almost always, and need no memory."""
    real = {n: as_real(t.detach()) for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    sums = dict(zip(real, numbers([tensor.sum() for tensor in real.values()]), strict=True))
    return [n for n, tensor in real.items() if not (math.isfinite(sums[n]) or bool(torch.isfinite(tensor).all()))]
