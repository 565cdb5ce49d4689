"""What the history says of a plan, and of predictions before."""

from dataclasses import replace

import pytest

from funcpipe.core import Estimate, Plan, Quantity
from funcpipe.history.correction import fit
from funcpipe.history.learned import as_observed, errors, known
from tests.e2e import small
from tests.history.observations import observation

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
    return replace(small.plan(2, 1), platform="aws-lambda", estimate=ESTIMATE)


def test_an_iteration_is_corrected_by_runs_with_its_sizes(plan: Plan) -> None:
    own = [observation(run=f"r{i}") for i in range(3)]
    others = [observation(size="2048MB", observed_s=9.0), observation(platform="aliyun-fc", observed_s=9.0)]
    others += [observation(quantity=Quantity.COMPUTE, observed_s=9.0)]
    (found,) = as_observed(plan, [*own, *others])
    factor = fit(own).factor
    assert (found.ran_on, found.runs, found.same_sizes) == ("local", 3, True)
    assert (found.modelled_s, found.modelled_usd) == (10.0, 0.5)
    assert found.observed_s == pytest.approx(10 * factor)
    assert found.observed_usd == pytest.approx(0.4 * factor + 0.1)


def test_without_runs_of_these_sizes_those_of_others_stand_in(plan: Plan) -> None:
    (found,) = as_observed(plan, [observation(size="2048MB", observed_s=4.0)])
    assert (found.runs, found.same_sizes) == (1, False)
    assert found.factor == pytest.approx(4 ** (1 / 1.25))


def test_each_place_is_told_by_itself(plan: Plan) -> None:
    places = ["aws-lambda", "local like aws-lambda"]
    found = as_observed(plan, [observation(ran_on=place) for place in places])
    assert [one.ran_on for one in found] == places


def test_nothing_is_told_of_other_platforms_or_without_an_estimate(plan: Plan) -> None:
    assert as_observed(plan, [observation(platform="aliyun-fc")]) == ()
    assert as_observed(plan, [observation(predicted_s=0.0)]) == ()
    assert as_observed(replace(plan, estimate=None), [observation()]) == ()


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
