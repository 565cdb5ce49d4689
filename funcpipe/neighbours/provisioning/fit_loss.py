"""Fits of loss models to curves of earlier or short runs, and where those curves come from: a run, or a file.

Both models are linear in all but one or two coefficients: those are searched, the others follow by least squares. Fits
tell the uncertainty of the coefficients.
"""

import csv
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from funcpipe.core import checks
from funcpipe.core.loss_model import InverseLoss, Matrix, WeightedLoss
from funcpipe.errors import DataError, FormatError, RunUnknown
from funcpipe.platforms.base import Storage

Array = NDArray[np.float64]

_SETTLING = 10
_GRID = 60
_REFINEMENTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """The loss after each of `steps` iterations of a run, whose iterations took `batch` samples.

    Of an asynchronous run `batch` is the weighted-average batch, and `convergence` its convergence coefficient.
    """

    steps: tuple[float, ...]
    losses: tuple[float, ...]
    batch: float
    workers: int = 1
    convergence: float = 0.0

    def __post_init__(self) -> None:
        checks.positive("batch", self.batch)
        checks.whole("workers", self.workers, 1)
        if len(self.steps) != len(self.losses):
            raise DataError(f"a loss curve has {len(self.steps)} steps and {len(self.losses)} losses: give one each")
        if not all(math.isfinite(loss) for loss in self.losses):
            raise DataError("a loss curve holds losses that are not finite: fit the part before it diverged")
        if any(step <= 0 for step in self.steps) or list(self.steps) != sorted(set(self.steps)):
            raise DataError("the steps of a loss curve must begin above 0 and rise")

    def after(self, skip: int | None = None) -> "LossCurve":
        """The curve without its first `skip` points; by default a tenth, whose losses fall unlike later ones."""
        skip = len(self.steps) // _SETTLING if skip is None else skip
        return replace(self, steps=self.steps[skip:], losses=self.losses[skip:])


def fit_inverse(curve: LossCurve, *, asynchronous: bool = False) -> InverseLoss:
    """Cynthia's β0/s + β1 by least squares; raises DataError for a curve that does not fall."""
    _check_points(curve, 3)
    slower = math.sqrt(curve.workers) if asynchronous else 1.0
    design = np.column_stack([slower / np.asarray(curve.steps), np.ones(len(curve.steps))])
    losses = np.asarray(curve.losses)
    scale, floor = _solve(design, losses)
    if scale <= 0:
        raise DataError(
            f"the loss does not fall along its {len(curve.steps)} points ({losses[0]:.4g} to {losses[-1]:.4g}): "
            "train longer, or leave out the first points (--set provision.skip=N)"
        )
    covariance, residual = _uncertainty(design, losses - design @ np.array([scale, floor]))
    return InverseLoss(
        scale=float(scale), floor=float(floor), batch=round(curve.batch), covariance=covariance, residual=residual
    )


def fit_weighted(curves: Sequence[LossCurve], *, heterogeneity: bool = True) -> WeightedLoss:
    """spotDNN's equation (3) over several runs; raises DataError unless they differ in their batches.

    γ1 (and γ4 with `heterogeneity`) are searched, γ2, γ3 and γ5 follow.
    """
    _check_batches(curves)
    steps = np.concatenate([curve.steps for curve in curves])
    losses = np.concatenate([curve.losses for curve in curves])
    batch = np.concatenate([np.full(len(c.steps), c.batch) for c in curves])
    workers = np.concatenate([np.full(len(c.steps), float(c.workers)) for c in curves])
    spread = np.concatenate([np.full(len(c.steps), c.convergence) for c in curves])
    several = heterogeneity and len({curve.convergence for curve in curves}) > 1
    gammas = _Separable(steps=steps, losses=losses, batch=batch, workers=workers, spread=spread)
    gamma1, gamma4 = gammas.search(several, heterogeneity=heterogeneity)
    root = gammas.root(gamma4, heterogeneity=heterogeneity)
    design = gammas.design(gamma1, root)
    gamma2, gamma3, gamma5 = _solve(design, losses)
    if gamma3 <= 0:
        raise DataError(
            "the loss does not fall along these curves: train longer, or leave out the first points (--set "
            "provision.skip=N)"
        )
    scale = gamma2 * batch + gamma3
    columns = [-scale * root / (steps + gamma1) ** 2, design[:, 0], design[:, 1], design[:, 2]]
    if several:
        columns.append(scale * workers / (2 * np.maximum(root, 1e-9)) / (steps + gamma1))
    covariance, residual = _uncertainty(np.column_stack(columns), losses - design @ np.array([gamma2, gamma3, gamma5]))
    return WeightedLoss(
        gamma1=gamma1,
        gamma2=float(gamma2),
        gamma3=float(gamma3),
        gamma4=gamma4,
        gamma5=float(gamma5),
        heterogeneity=heterogeneity,
        covariance=covariance,
        residual=residual,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Separable:
    """The points of all curves, and the least squares for given γ1 and γ4."""

    steps: Array
    losses: Array
    batch: Array
    workers: Array
    spread: Array

    def root(self, gamma4: float, *, heterogeneity: bool) -> Array:
        inner = (self.spread + gamma4) * self.workers if heterogeneity else self.workers
        found: Array = np.sqrt(inner)
        return found

    def design(self, gamma1: float, root: Array) -> Array:
        share = root / (self.steps + gamma1)
        return np.column_stack([self.batch * share, share, np.ones_like(share)])

    def error(self, gamma1: float, root: Array) -> float:
        design = self.design(gamma1, root)
        return float(np.sum((self.losses - design @ _solve(design, self.losses)) ** 2))

    def best_gamma1(self, root: Array) -> tuple[float, float]:
        """γ1 between 0 and a hundred times the longest curve, on a logarithmic scale, and its error."""
        top = math.log1p(100 * float(self.steps.max()))
        return _minimum(lambda x: self.error(math.expm1(x), root), top)

    def search(self, several: bool, *, heterogeneity: bool) -> tuple[float, float]:
        """γ1 and γ4. Where all curves have one convergence coefficient, γ4 only scales γ2 and γ3, and is 1."""
        if not several:
            return math.expm1(self.best_gamma1(self.root(1.0, heterogeneity=heterogeneity))[0]), 1.0
        top = math.log1p(100.0)
        at, _ = _minimum(lambda x: self.best_gamma1(self.root(math.expm1(x), heterogeneity=True))[1], top, points=20)
        gamma4 = max(math.expm1(at), 1e-6)
        return math.expm1(self.best_gamma1(self.root(gamma4, heterogeneity=True))[0]), gamma4


def _minimum(error: Callable[[float], float], top: float, points: int = _GRID) -> tuple[float, float]:
    """The smallest error between 0 and `top`: the best point of a grid, then the golden section around it."""
    grid = np.linspace(0.0, top, points)
    errors = [error(float(x)) for x in grid]
    at = int(np.argmin(errors))
    low, high = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, points - 1)])
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    e_left, e_right = error(left), error(right)
    for _ in range(_REFINEMENTS if points == _GRID else 15):
        if e_left <= e_right:
            high, right, e_right = right, left, e_left
            left = high - ratio * (high - low)
            e_left = error(left)
        else:
            low, left, e_left = left, right, e_right
            right = low + ratio * (high - low)
            e_right = error(right)
    return min([(float(grid[at]), errors[at]), (left, e_left), (right, e_right)], key=lambda pair: pair[1])


def _solve(design: Array, values: Array) -> Array:
    """Least squares, with columns scaled to one size."""
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    found: Array = np.linalg.lstsq(design / scale, values, rcond=None)[0] / scale
    return found


def _uncertainty(jacobian: Array, residuals: Array) -> tuple[Matrix, float]:
    """Covariance of the coefficients and standard deviation of the residuals.

    Residuals of neighbouring steps correlate, so they count as fewer points: n·(1 − ρ)/(1 + ρ), ρ their correlation.
    """
    points, order = jacobian.shape
    variance = float(residuals @ residuals) / max(points - order, 1)
    energy = float(residuals @ residuals)
    correlation = float(residuals[1:] @ residuals[:-1]) / energy if energy > 1e-300 else 0.0
    correlation = min(max(correlation, 0.0), 0.99)
    scale = np.maximum(np.abs(jacobian).max(axis=0), 1e-300)
    scaled = jacobian / scale
    inverse = np.linalg.pinv(scaled.T @ scaled) / np.outer(scale, scale)
    covariance = variance * (1 + correlation) / (1 - correlation) * inverse
    return tuple(tuple(float(x) for x in row) for row in covariance), math.sqrt(variance)


def _check_batches(curves: Sequence[LossCurve]) -> None:
    for curve in curves:
        _check_points(curve, 3)
    if len({curve.batch for curve in curves}) < 2:
        raise DataError(
            "equation (3) tells how the loss depends on the batch: give curves of at least two different batches, "
            "or fit β0/s + β1 to one"
        )


def _check_points(curve: LossCurve, least: int) -> None:
    if len(curve.steps) < least:
        raise DataError(f"a loss curve of {len(curve.steps)} points cannot be fitted: give at least {least}")


def run_curve(run: str, *, storage: str | Storage) -> LossCurve:
    """The mean loss of each step of a run that has finished and was kept, or of one that still trains, so far.

    Raises RunUnknown, or RunKeyMissing for a run of another machine.
    """
    from funcpipe.platforms.catalog import open_storage
    from funcpipe.runstate.reader import RunReader
    from funcpipe.runstate.signing import signed

    reader = RunReader.newest(signed(open_storage(storage) if isinstance(storage, str) else storage), run)
    record, losses = reader.record, reader.losses
    if not losses:
        raise RunUnknown(f"run {run} has reported no loss yet; try again later")
    steps = tuple(float(step) for step in range(record.began_step + 1, record.began_step + len(losses) + 1))
    return LossCurve(steps=steps, losses=losses, batch=record.plan.global_batch)


def file_curve(path: str | os.PathLike[str], *, batch: float, run: str | None = None) -> LossCurve:
    """The losses in a file: JSON (`[…]`, or an object with `losses` and perhaps `steps`), or CSV with a column `loss`.

    The column `step` counts lines from 1 if it is missing. A CSV of several runs, as `CSVLogger` writes, needs `run`.
    """
    text = Path(path)
    try:
        steps, losses = _from_csv(text, run) if text.suffix.lower() == ".csv" else _from_json(text)
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    return LossCurve(steps=tuple(steps), losses=tuple(losses), batch=batch)


def _from_json(path: Path) -> tuple[list[float], list[float]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path}: not JSON: {error}") from error
    found: Any = data.get("losses") if isinstance(data, dict) else data
    if not isinstance(found, list):
        raise FormatError(f"{path}: expected an array of losses, or an object with the field 'losses'")
    steps = data.get("steps") if isinstance(data, dict) else None
    if not isinstance(steps, list):  # what `train --json` prints counts its steps in another way
        steps = range(1, len(found) + 1)
    try:
        return [float(step) for step in steps], [float(loss) for loss in found]
    except (TypeError, ValueError) as error:
        raise FormatError(f"{path}: field 'losses' must be an array of numbers: {error}") from error


def _from_csv(path: Path, run: str | None) -> tuple[list[float], list[float]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or "loss" not in rows[0]:
        raise FormatError(f"{path}: expected a line of names with 'loss' among them, and lines of values below it")
    runs = sorted({row["run"] for row in rows if row.get("run")})
    if run is None and len(runs) > 1:
        raise DataError(f"{path} holds the runs {', '.join(runs)}: say which with --run")
    if run is not None and run not in runs:
        raise DataError(f"{path} holds no run {run!r}, only {', '.join(runs) or 'lines without a run'}")
    own = [row for row in rows if row["loss"] and (run is None or row["run"] == run)]
    try:
        return [float(row.get("step") or i) for i, row in enumerate(own, start=1)], [float(row["loss"]) for row in own]
    except ValueError as error:
        raise FormatError(f"{path}: steps and losses must be numbers: {error}") from error
