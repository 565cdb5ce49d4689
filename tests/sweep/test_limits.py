"""The limits of a sweep: launch rates, dollars and seconds, and what is predicted of it."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import JobEstimate, JobItem, RunLimits
from funcpipe.platforms.catalog import load_spec
from funcpipe.sweep.budget import Budget, Spending, estimate_sweep, simulate_waves

LAMBDA = load_spec("aws-lambda")
LOCAL = load_spec("local")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


def test_a_thousand_functions_start_at_once_on_lambda_and_as_many_ten_seconds_later() -> None:
    waves = simulate_waves([60.0] * 2000, at_once=2000, spec=LAMBDA)
    assert waves.starts_s[999] == 0.0
    assert waves.starts_s[1499] == pytest.approx(5.0)
    assert waves.starts_s[1999] == pytest.approx(10.0)
    assert waves.seconds == pytest.approx(70.0)


@given(durations_s=st.lists(st.floats(0.1, 50), max_size=40), at_once=st.integers(1, 8), client_s=st.floats(0.0, 0.5))
def test_simulated_trials_run_in_order_and_no_more_at_once(
    durations_s: list[float], at_once: int, client_s: float
) -> None:
    waves = simulate_waves(durations_s, at_once=at_once, spec=LOCAL, client_s=client_s)
    assert list(waves.starts_s) == sorted(waves.starts_s)
    for start_s in waves.starts_s:
        running = sum(a <= start_s < b - 1e-9 for a, b in zip(waves.starts_s, waves.ends_s, strict=True))
        assert running <= at_once
    for before, after in itertools.pairwise(waves.starts_s):
        assert after - before >= client_s - 1e-9


ESTIMATE = JobEstimate(
    platform="aws-lambda",
    epochs=4,
    steps=40,
    start=JobItem(count=1, seconds=5.0, functions_usd=0.1, requests_usd=0.1),
    training=JobItem(count=40, seconds=40.0, functions_usd=0.8),
    client=JobItem(count=40, requests_usd=7.0),
)


def test_a_sweep_is_expected_to_cost_between_pruned_and_whole_trials() -> None:
    found = estimate_sweep(ESTIMATE, trials=10, at_once=5, spec=LOCAL, functions=1, first_share=0.25)
    assert found.trial_usd == pytest.approx(1.0), "without what a client of a single run asks for"
    assert (found.low_usd, found.high_usd) == pytest.approx((1.0 + 9 * 0.4, 10.0))
    assert (found.low_s, found.high_s) == pytest.approx((45.0, 90.0))
    assert found.line() == "10 trials, 5 at once, about 45 s to 2 min, $4.60 to $10.00 on aws-lambda"
    whole = estimate_sweep(ESTIMATE, trials=10, at_once=5, spec=LOCAL, functions=1, first_share=None)
    assert whole.low_usd == whole.high_usd == pytest.approx(10.0)


def spending(usd: float, expected_usd: float = 0.0, usd_s: float = 0.0) -> Spending:
    return Spending(usd=usd, expected_usd=expected_usd, usd_s=usd_s)


def test_a_trial_starts_if_it_is_expected_to_end_within_the_limits() -> None:
    clock = Clock()
    budget = Budget(RunLimits(max_usd=3.0, deadline_s=100.0), clock=clock)
    budget.estimated(ESTIMATE)
    assert budget.may_start([spending(0.2, 1.0), spending(0.1, 1.0)], client_usd=0.0)
    assert not budget.may_start([spending(0.2, 1.0), spending(0.1, 1.0)], client_usd=0.1)
    budget.ended(0.5, 30.0, whole=True)
    assert budget.trial_usd == 0.5, "what one did counts more than what was estimated"
    budget.ended(0.7, 20.0, whole=True)
    budget.ended(0.1, 2.0, whole=False)
    assert (budget.trial_usd, budget.trial_s, budget.ended_usd) == pytest.approx((0.7, 30.0, 1.3))
    clock.now_s = 69.0
    assert budget.may_start([], client_usd=0.0)
    clock.now_s = 71.0
    assert not budget.may_start([], client_usd=0.0)


def test_the_last_trials_end_for_the_others_to_end_within_the_limits() -> None:
    clock = Clock()
    budget = Budget(RunLimits(max_usd=10.0, deadline_s=100.0), clock=clock)
    running = [spending(1.0, 3.0), spending(1.0, 3.0), spending(1.0, 3.0)]
    assert budget.to_stop(running, client_usd=0.0) == 0
    assert budget.to_stop(running, client_usd=2.0) == 1, "3 + 3 + 1 for the one that ends"
    assert budget.to_stop([spending(1.0, 30.0)] * 3, client_usd=0.0) == 2, "one may cost less than expected"
    assert budget.to_stop([spending(3.0, 3.0, 1.0)] * 2, client_usd=0.0) == 2, (
        "for three seconds more they cost too much"
    )
    clock.now_s = 100.0
    assert budget.to_stop(running, client_usd=0.0) == 3
    assert Budget(RunLimits()).to_stop([spending(math.inf)], client_usd=0.0) == 0
