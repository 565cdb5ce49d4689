"""Fitting a loss: what was put in comes out, and the uncertainty is that of repeated draws."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core.json_form import from_text, to_text
from funcpipe.core.loss_model import InverseLoss, WeightedLoss
from funcpipe.errors import DataError, Infeasible, InvalidValue
from funcpipe.neighbours.provisioning.fit_loss import LossCurve, fit_inverse, fit_weighted

STEPS = tuple(float(step) for step in range(1, 201))


def inverse_curve(scale: float, floor: float, *, noise: float = 0.0, seed: int = 0, workers: int = 1) -> LossCurve:
    draw = np.random.default_rng(seed)
    losses = tuple(float(scale * math.sqrt(workers) / s + floor + noise * draw.normal()) for s in STEPS)
    return LossCurve(steps=STEPS, losses=losses, batch=64, workers=workers)


@given(scale=st.floats(0.1, 1000), floor=st.floats(-1, 5), workers=st.integers(1, 16))
def test_an_exact_curve_gives_back_its_coefficients(scale: float, floor: float, workers: int) -> None:
    found = fit_inverse(inverse_curve(scale, floor, workers=workers), asynchronous=True)
    assert found.scale == pytest.approx(scale, rel=1e-6)
    assert found.floor == pytest.approx(floor, rel=1e-6, abs=1e-6)
    assert found.residual == pytest.approx(0, abs=1e-6 * scale)
    assert found.steps(floor + 1, workers=4, asynchronous=True) == pytest.approx(2 * found.steps(floor + 1), rel=1e-6)


def test_the_uncertainty_is_that_of_repeated_runs() -> None:
    fits = [fit_inverse(inverse_curve(50, 0.4, noise=0.2, seed=seed)) for seed in range(200)]
    told = np.mean([np.asarray(fit.covariance) for fit in fits], axis=0)
    drawn = np.cov([[fit.scale for fit in fits], [fit.floor for fit in fits]])
    assert np.sqrt(np.diag(told)) == pytest.approx(np.sqrt(np.diag(drawn)), rel=0.2)
    assert fits[0].residual == pytest.approx(0.2, rel=0.15)
    spread = np.std([fit.steps(0.8) for fit in fits]) / np.mean([fit.steps(0.8) for fit in fits])
    assert fits[0].spread(0.8) == pytest.approx(spread, rel=0.3)


def test_neighbours_that_are_alike_count_as_fewer_points() -> None:
    draw = np.random.default_rng(1)
    noise = np.convolve(draw.normal(size=len(STEPS) + 19), np.ones(20) / 20, mode="valid")
    losses = tuple(50 / s + 0.4 + float(e) for s, e in zip(STEPS, noise, strict=True))
    smooth = fit_inverse(LossCurve(steps=STEPS, losses=losses, batch=64))
    shuffled = draw.permutation(noise)
    rough = fit_inverse(
        LossCurve(
            steps=STEPS, losses=tuple(50 / s + 0.4 + float(e) for s, e in zip(STEPS, shuffled, strict=True)), batch=64
        )
    )
    assert smooth.covariance[1][1] > 4 * rough.covariance[1][1]


def weighted_curves(model: WeightedLoss) -> list[LossCurve]:
    shapes = [(512.0, 2, 0.71), (1024.0, 4, 0.86), (1500.0, 7, 0.9), (800.0, 4, 0.6)]
    return [
        LossCurve(
            steps=STEPS,
            losses=tuple(model.loss(s, batch=batch, workers=workers, convergence=convergence) for s in STEPS),
            batch=batch,
            workers=workers,
            convergence=convergence,
        )
        for batch, workers, convergence in shapes
    ]


@pytest.mark.parametrize("gamma4", [0.3, 2.0])
def test_equation_3_gives_back_its_coefficients(gamma4: float) -> None:
    model = WeightedLoss(gamma1=80, gamma2=-0.02, gamma3=150, gamma4=gamma4, gamma5=0.5)
    found = fit_weighted(weighted_curves(model))
    for name, rel in (("gamma1", 0.01), ("gamma2", 0.02), ("gamma3", 0.02), ("gamma4", 0.02), ("gamma5", 0.01)):
        assert getattr(found, name) == pytest.approx(getattr(model, name), rel=rel)
    assert len(found.covariance) == 5
    at = {"batch": 900.0, "workers": 3, "convergence": 0.75}
    assert found.steps(0.8, **at) == pytest.approx(model.steps(0.8, **at), rel=0.005)  # type: ignore[arg-type]


def test_equation_3_without_the_convergence_coefficient() -> None:
    model = WeightedLoss(gamma1=80, gamma2=-0.02, gamma3=150, gamma5=0.5, heterogeneity=False)
    found = fit_weighted(weighted_curves(model), heterogeneity=False)
    assert [found.gamma1, found.gamma3] == pytest.approx([80, 150], rel=1e-3)
    assert len(found.covariance) == 4
    assert found.spread(0.8, batch=900, workers=3, convergence=0.75) < 1e-3


def test_the_spread_of_equation_3_is_that_of_its_coefficients() -> None:
    """The gradient in closed form against one by differences."""
    model = WeightedLoss(gamma1=80, gamma2=-0.02, gamma3=150, gamma4=0.4, gamma5=0.5)
    names, at = ("gamma1", "gamma2", "gamma3", "gamma5", "gamma4"), (0.8, 900.0, 3, 0.7)

    def steps(**changed: float) -> float:
        values = {name: getattr(model, name) for name in names} | changed
        return WeightedLoss(**values).steps(at[0], batch=at[1], workers=at[2], convergence=at[3])

    for i, name in enumerate(names):
        value = getattr(model, name)
        step = 1e-5 * abs(value)
        slope = (steps(**{name: value + step}) - steps(**{name: value - step})) / (2 * step)
        matrix = tuple(tuple(float(j == k == i) for k in range(5)) for j in range(5))
        known = WeightedLoss(gamma1=80, gamma2=-0.02, gamma3=150, gamma4=0.4, gamma5=0.5, covariance=matrix)
        told = known.spread(at[0], batch=at[1], workers=3, convergence=at[3])
        assert told == pytest.approx(abs(slope) / steps(), rel=1e-4)


def test_models_are_documents() -> None:
    inverse = fit_inverse(inverse_curve(50, 0.4, noise=0.1))
    assert from_text(InverseLoss, to_text(inverse), source="x") == inverse
    weighted = WeightedLoss(gamma1=1, gamma2=-0.1, gamma3=100, gamma5=0.5)
    assert from_text(WeightedLoss, to_text(weighted), source="x") == weighted


def test_what_cannot_be_fitted_is_told() -> None:
    rising = LossCurve(steps=(1, 2, 3), losses=(1.0, 2.0, 3.0), batch=8)
    with pytest.raises(DataError, match=r"does not fall along its 3 points \(1 to 3\)"):
        fit_inverse(rising)
    with pytest.raises(DataError, match="of 2 points cannot be fitted"):
        fit_inverse(rising.after(1))
    with pytest.raises(DataError, match="at least two different batches"):
        fit_weighted([inverse_curve(50, 0.4)])
    with pytest.raises(DataError, match="not finite"):
        LossCurve(steps=(1, 2), losses=(1.0, math.nan), batch=8)
    with pytest.raises(DataError, match="begin above 0 and rise"):
        LossCurve(steps=(0, 1), losses=(1.0, 1.0), batch=8)
    with pytest.raises(DataError, match="2 steps and 1 losses"):
        LossCurve(steps=(1, 2), losses=(1.0,), batch=8)
    with pytest.raises(InvalidValue, match="2 rows of 2"):
        InverseLoss(scale=1, floor=0, batch=8, covariance=((1.0,),))
    with pytest.raises(Infeasible, match="holds for weighted batches below 1000 samples, got 2000"):
        WeightedLoss(gamma1=1, gamma2=-0.1, gamma3=100, gamma5=0.5).steps(1, batch=2000, workers=1, convergence=0)


def test_by_default_the_first_tenth_of_a_curve_is_left_out() -> None:
    curve = LossCurve(steps=tuple(range(1, 31)), losses=tuple(1 / step for step in range(1, 31)), batch=8)
    assert curve.after().steps == tuple(range(4, 31))
    assert curve.after(0) == curve
    assert replace(curve, steps=(1.0, 2.0), losses=(2.0, 1.0)).after().steps == (1.0, 2.0), "few points all count"
