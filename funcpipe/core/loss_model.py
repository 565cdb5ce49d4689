"""Models of the loss during training: two published ones, with the uncertainty of their coefficients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from funcpipe.core import checks
from funcpipe.errors import Infeasible, InvalidValue

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InverseLoss:
    """The loss after s iterations is scale/s + floor; with n asynchronous workers, scale·√n/s + floor.

    This form is the one attributed to Cynthia (ICPP 2019), whose text was not available: it is a reconstruction.
    `batch` is the samples of an iteration. `covariance` is that of (scale, floor), `residual` the standard deviation of
    losses around the curve.
    """

    FORMAT: ClassVar[str] = "funcpipe.loss-inverse/1"

    scale: float
    floor: float
    batch: int
    covariance: Matrix = ()
    residual: float = 0.0

    def __post_init__(self) -> None:
        checks.positive("scale", self.scale)
        checks.whole("batch", self.batch, 1)
        checks.at_least("residual", self.residual, 0)
        _check_covariance(self.covariance, 2)

    def loss(self, steps: float, *, workers: int = 1, asynchronous: bool = False) -> float:
        """Return the loss after `steps` iterations."""
        return self.scale * self._slower(workers, asynchronous) / steps + self.floor

    def steps(self, target: float, *, workers: int = 1, asynchronous: bool = False) -> float:
        """Return the number of iterations that reach `target`; raises Infeasible if none do."""
        check_above_floor(target, self.floor)
        return self.scale * self._slower(workers, asynchronous) / (target - self.floor)

    def spread(self, target: float) -> float:
        """Return the standard deviation of `steps` as a share of it, to first order in the coefficients."""
        gap = target - self.floor
        return _spread((1 / self.scale, 1 / gap), self.covariance)

    @staticmethod
    def _slower(workers: int, asynchronous: bool) -> float:
        return math.sqrt(workers) if asynchronous else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedLoss:
    """Equation (3) of spotDNN (IWQoS 2023), for asynchronous workers of different speeds.

    f(b_w, R, N, j) = (γ2·b_w + γ3)·√((R + γ4)·N) / (j + γ1) + γ5, where b_w is the weighted-average batch, R the
    convergence coefficient, N the number of workers and j the normalised iterations, of b_w samples each. Without
    `heterogeneity`, √((R + γ4)·N) is √N, as in the script released with the paper. `covariance` is that of the
    coefficients that were fitted: (γ1, γ2, γ3, γ5), and γ4 last where it was.
    """

    FORMAT: ClassVar[str] = "funcpipe.loss-weighted/1"

    gamma1: float
    gamma2: float
    gamma3: float
    gamma5: float
    gamma4: float = 1.0
    heterogeneity: bool = True
    covariance: Matrix = ()
    residual: float = 0.0

    def __post_init__(self) -> None:
        checks.at_least("gamma1", self.gamma1, 0)
        checks.positive("gamma3", self.gamma3)
        checks.at_least("gamma4", self.gamma4, 0)
        if self.heterogeneity and self.gamma4 == 0:
            raise InvalidValue(
                "gamma4", self.gamma4, "must be above 0 with heterogeneity: one worker would need no steps"
            )
        checks.at_least("residual", self.residual, 0)
        _check_covariance(self.covariance, 4 + (len(self.covariance) == 5))

    def loss(self, steps: float, *, batch: float, workers: int, convergence: float) -> float:
        """Return the loss after `steps` normalised iterations."""
        return self._scale(batch, workers, convergence) / (steps + self.gamma1) + self.gamma5

    def steps(self, target: float, *, batch: float, workers: int, convergence: float) -> float:
        """Return the number of normalised iterations that reach `target`, at least 0; raises Infeasible if none do."""
        check_above_floor(target, self.gamma5)
        return max(self._scale(batch, workers, convergence) / (target - self.gamma5) - self.gamma1, 0.0)

    def spread(self, target: float, *, batch: float, workers: int, convergence: float) -> float:
        """Return the standard deviation of `steps` as a share of it, to first order in the coefficients."""
        gap, root = target - self.gamma5, self._root(workers, convergence)
        scale, steps = self._scale(batch, workers, convergence), 0.0
        steps = max(scale / gap - self.gamma1, 1e-9)
        gradient = [-1.0, batch * root / gap, root / gap, scale / gap**2]
        if len(self.covariance) == 5:
            inner = max((convergence + self.gamma4) * workers, 1e-12)
            gradient.append((self.gamma2 * batch + self.gamma3) * workers / (2 * math.sqrt(inner)) / gap)
        return _spread([slope / steps for slope in gradient], self.covariance)

    def _root(self, workers: int, convergence: float) -> float:
        return math.sqrt((convergence + self.gamma4) * workers if self.heterogeneity else workers)

    def _scale(self, batch: float, workers: int, convergence: float) -> float:
        """Return the numerator; a batch beyond −γ3/γ2, where it would be negative, is outside what was fitted."""
        scale = self.gamma2 * batch + self.gamma3
        if scale <= 0:
            raise Infeasible(
                f"the loss model holds for weighted batches below {-self.gamma3 / self.gamma2:.0f} samples, "
                f"got {batch:.0f}; take fewer or smaller workers, or fit the model on larger batches"
            )
        return scale * self._root(workers, convergence)


LossModel = InverseLoss | WeightedLoss


def check_above_floor(target: float, floor: float) -> None:
    """Raise Infeasible for a loss that the model never reaches."""
    if target <= floor:
        raise Infeasible(
            f"the loss {target:g} is out of reach: by its model it falls towards {floor:.4g}; "
            "ask for a higher loss, or train another model"
        )


def _check_covariance(matrix: Matrix, order: int) -> None:
    if matrix and (len(matrix) != order or any(len(row) != order for row in matrix)):
        raise InvalidValue("covariance", matrix, f"must be empty, or have {order} rows of {order} numbers")


def _spread(gradient: Sequence[float], covariance: Matrix) -> float:
    """√(gᵀ·C·g); 0 where the covariance is not known."""
    if not covariance:
        return 0.0
    each = (g * h * c for g, row in zip(gradient, covariance, strict=True) for h, c in zip(gradient, row, strict=True))
    return math.sqrt(max(sum(each), 0.0))
