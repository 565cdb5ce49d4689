"""Corrections by what was observed: the formulas by hand, and how much better predictions get."""

import math
import random
from statistics import median

import pytest

from funcpipe.core import Observation, Quantity
from funcpipe.neighbours.history.learned import fit
from tests.neighbours.history.observations import observation


def test_the_worked_example_of_the_docstring() -> None:
    twice = [observation(run=f"r{i}", predicted_s=1.0 + i, observed_s=2.0 + 2 * i) for i in range(3)]
    assert fit(twice[:1]).factor == pytest.approx(2 ** (1 / 1.25))
    assert math.log(fit(twice).factor) == pytest.approx(2.548 * 0.693 / 2.798, abs=1e-3)
    assert fit(twice).factor == pytest.approx(1.88, abs=0.005)
    assert fit(twice * 50).factor == pytest.approx(1.95, abs=0.005)
    assert (fit(twice).runs, fit(twice).offset_s) == (3, 0.0)


def test_newer_observations_count_more() -> None:
    slow = [observation(observed_s=4.0)] * 8
    fast = [observation(observed_s=1.0)] * 8
    assert fit([*slow, *fast]).factor < 1.5 < 2.5 < fit([*fast, *slow]).factor


def test_a_start_up_is_corrected_by_seconds() -> None:
    starts = [observation(quantity=Quantity.START_UP, predicted_s=0.0, observed_s=3.0)] * 2
    found, weights = fit(starts), 1 + 2 ** (-1 / 4)
    assert found.factor == 1
    assert found.offset_s == pytest.approx(3 * weights / (weights + 0.25))
    assert found.apply(0.5) == pytest.approx(0.5 + found.offset_s)


def test_no_prediction_is_below_nothing() -> None:
    found = fit([observation(quantity=Quantity.START_UP, predicted_s=5.0, observed_s=1.0)] * 3)
    assert found.apply(1.0) == 0.0


def test_nothing_observed_changes_nothing() -> None:
    assert fit([]).apply(2.5) == 2.5
    assert fit([observation(predicted_s=0.0, observed_s=2.0)]).apply(2.5) == 2.5


@pytest.mark.parametrize("factor", [0.4, 0.6, 1.7, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_after_three_runs_the_error_is_at_most_half(factor: float, seed: int) -> None:
    """Runs of plans of many sizes, 5 % of noise: the median error of twenty later runs, corrected and not."""
    chance = random.Random(seed)

    def ran() -> Observation:
        predicted_s = chance.uniform(0.1, 20.0)
        return observation(predicted_s=predicted_s, observed_s=predicted_s * factor * chance.lognormvariate(0, 0.05))

    learned = fit([ran() for _ in range(3)])
    later = [ran() for _ in range(20)]
    before = median(abs(one.predicted_s - one.observed_s) / one.observed_s for one in later)
    after = median(abs(learned.apply(one.predicted_s) - one.observed_s) / one.observed_s for one in later)
    assert after <= before / 2
