"""What the history says of a plan, and of predictions before."""

import math
import random
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import Estimate, Observation, Plan, Quantity
from funcpipe.neighbours.history.learned import as_observed, errors, fit, known
from tests.e2e import small
from tests.neighbours.history.observations import observation

ESTIMATE = Estimate(
    iteration_s=10.0,
    cost_usd=0.5,
    compute_usd=0.4,
    request_usd=0.1,
    peak_memory_bytes=1,
    puts=1,
    gets=1,
    bottleneck="stage 0 compute",
    stages=(),
)


@pytest.fixture
def plan() -> Plan:
    """Two stages of 1024MB."""
    return replace(small.plan(2, 1), model="small", platform="aws-lambda", estimate=ESTIMATE)


def here(**fields: Any) -> Observation:
    """A run like the plan's, on Lambda itself, that took twice as long as predicted unless `fields` say otherwise."""
    return observation(**{"ran_on": "aws-lambda", "predicted_s": 10.0, "observed_s": 20.0, **fields})


def test_an_iteration_is_corrected_by_runs_with_its_sizes(plan: Plan) -> None:
    own = [here(run=f"r{i}") for i in range(3)]
    others = [here(size="2048MB", observed_s=90.0), here(platform="aliyun-fc", observed_s=90.0)]
    others += [here(quantity=Quantity.COMPUTE, observed_s=90.0)]
    found = as_observed(plan, [*own, *others])
    assert found is not None
    factor = fit(own).factor
    assert (found.ran_on, found.runs, found.same_sizes) == ("aws-lambda", 3, True)
    assert (found.modelled_s, found.modelled_usd) == (10.0, 0.5)
    assert found.observed_s == pytest.approx(10 * factor)
    assert found.observed_usd == pytest.approx(0.4 * factor + 0.1)


def test_without_runs_of_these_sizes_those_of_others_stand_in(plan: Plan) -> None:
    found = as_observed(plan, [here(size="2048MB", observed_s=40.0)])
    assert found is not None
    assert (found.runs, found.same_sizes) == (1, False)
    assert found.factor == pytest.approx(4 ** (1 / 1.25))


PLACES = ("aws-lambda", "local like aws-lambda", "local")


@given(
    ran_on=st.sampled_from(PLACES),
    asked=st.sampled_from((None, *PLACES)),
    model=st.sampled_from(["small", "toy"]),
    predicted_s=st.floats(1e-6, 1e3),
)
def test_a_run_counts_only_where_it_ran_and_for_work_like_its_own(
    ran_on: str, asked: str | None, model: str, predicted_s: float
) -> None:
    """A toy's run on this machine, 18.75 times as long as predicted, says nothing of a plan for Lambda."""
    plan = replace(small.plan(2, 1), model="small", platform="aws-lambda", estimate=ESTIMATE)
    seen = here(ran_on=ran_on, model=model, predicted_s=predicted_s, observed_s=18.75 * predicted_s)
    found = as_observed(plan, [seen], ran_on=asked)
    counts = ran_on == (asked or "aws-lambda") and model == "small" and 5 <= predicted_s <= 20
    assert (found is not None) is counts
    assert found is None or found.ran_on == ran_on


def test_nothing_is_told_of_other_platforms_or_without_an_estimate(plan: Plan) -> None:
    assert as_observed(plan, [here(platform="aliyun-fc")]) is None
    assert as_observed(plan, [here(predicted_s=0.0)]) is None
    assert as_observed(replace(plan, estimate=None), [here()]) is None


def test_models_are_known_apart_and_a_run_is_predicted_by_those_like_it() -> None:
    toys = [observation(run=f"t{i}", predicted_s=1e-4, observed_s=1e-2) for i in range(3)]
    runs = [observation(run=f"r{i}") for i in range(3)]
    (mixed,) = known([*toys, *runs])
    assert mixed.factor == fit(runs).factor
    (off,) = errors([*toys, *runs])
    assert off.after[3] == off.before[3] == 0.5
    assert [one.model for one in known([observation(model="b"), observation(model="a")])] == ["a", "b"]


def test_errors_are_those_of_predictions_made_before_the_run() -> None:
    runs = [observation(run=f"r{i}") for i in range(3)]
    (one,) = known(runs[:1])
    assert (one.runs, one.error_before, one.error_after) == (1, 0.5, None)
    (all_three,) = known(runs)
    after = [abs(fit(runs[:i]).factor - 2) / 2 for i in (1, 2)]
    assert all_three.error_before == 0.5
    assert all_three.error_after == pytest.approx(sum(after) / 2)
    assert all_three.factor == fit(runs).factor


def test_quantities_and_sizes_are_known_apart() -> None:
    found = known([observation(quantity=quantity, size=size) for size in ("b", "a") for quantity in Quantity])
    assert [(one.size, one.quantity) for one in found] == [(size, one) for size in ("a", "b") for one in Quantity]


def test_errors_of_each_run_are_those_with_what_was_known_before_it() -> None:
    runs = [observation(run=f"r{i}") for i in range(3)]
    (found,) = errors([*runs, observation(run="r3", observed_s=0.0)])
    assert found.before == (0.5, 0.5, 0.5)
    assert found.after == (0.5, *(pytest.approx((2 - fit(runs[:i]).factor) / 2) for i in (1, 2)))
    (summary,) = known(runs)
    assert summary.error_after == pytest.approx(sum(found.after[1:]) / 2)


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
