from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.comm.arrival_estimator import ArrivalEstimator, Expectation


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 10), st.floats(0, 1))
def test_pauses_stay_within_their_bounds(since_s: float, due_s: float, spread_s: float, trip_s: float) -> None:
    estimator = ArrivalEstimator(deadline_s=60)
    pause_s = estimator.pause_s(since_s, due_s, spread_s, trip_s)
    most_s = estimator.most_s if since_s - due_s < 10 else 0.2
    assert estimator.least_s <= pause_s <= max(most_s, due_s - since_s, spread_s / 2, 0.005 * due_s)


GET_USD, IDLE_USD_S = 4e-7, 8 * 2 * 1.66667e-5  # S3's, and eight functions of 2 GB


@pytest.mark.parametrize(("late_s", "idle_usd_s"), [(12.0, IDLE_USD_S / 8), (60.0, IDLE_USD_S), (900.0, IDLE_USD_S)])
def test_a_long_wait_is_asked_about_as_often_as_costs_least(late_s: float, idle_usd_s: float) -> None:
    estimator = ArrivalEstimator(deadline_s=3600, empty_get_usd=GET_USD, idle_usd_s=idle_usd_s)

    def cost_usd(pause_s: float) -> float:
        return late_s / pause_s * GET_USD + pause_s / 2 * idle_usd_s

    choices = [0.2 + number / 1000 for number in range(801)]
    assert estimator.pause_s(late_s) == pytest.approx(min(choices, key=cost_usd), abs=0.001)


@pytest.mark.parametrize(
    ("empty_get_usd", "idle_usd_s", "pause_s"), [(0, 1, 0.2), (1, 1e-9, 1.0), (0, 0, 0.2), (1, 0, 0.2)]
)
def test_a_long_wait_is_asked_about_every_fifth_of_a_second_to_every_second(
    empty_get_usd: float, idle_usd_s: float, pause_s: float
) -> None:
    estimator = ArrivalEstimator(deadline_s=3600, empty_get_usd=empty_get_usd, idle_usd_s=idle_usd_s)
    assert estimator.pause_s(100.0, due_s=1.0, spread_s=0.5) == pause_s
    assert estimator.pause_s(10.9, due_s=1.0) == estimator.most_s


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=10), st.floats(0, 10))
def test_an_expectation_lies_within_what_was_seen(waits: list[tuple[float, float]], start_s: float) -> None:
    expected = Expectation(ArrivalEstimator(deadline_s=60))
    for one, other in waits:
        expected.learn((start_s,), start_s + min(one, other), start_s + max(one, other))
    due, last = expected.due((start_s,)), waits[-4:]
    assert due.start_s == start_s
    assert min(min(pair) for pair in last) <= due.due_s + 1e-9
    assert due.due_s + due.spread_s <= max(max(pair) for pair in last) + 1e-9


def test_of_nothing_seen_nothing_is_expected() -> None:
    due = Expectation(ArrivalEstimator(deadline_s=60)).due((3.0, 4.0))
    assert (due.start_s, due.due_s, due.spread_s) == (3.0, 0.0, 0.0)


def test_the_steadier_start_tells_but_no_later_than_the_other_has_ever_told() -> None:
    expected = Expectation(ArrivalEstimator(deadline_s=60))
    for late_s in (0.0, 0.3, 0.1, 0.2):  # what comes 1 s after the reader asks, who asks at one time or another
        expected.learn((0.0, 5 + late_s), 5.9 + late_s, 6 + late_s)
    due = expected.due((0.0, 5.15))
    assert due.start_s == 5.15
    assert 0.9 <= due.due_s <= 1
    assert due.spread_s < 1e-9
    due = expected.due((0.0, 9.0))  # by then it has long come
    assert due.start_s + due.due_s == 9.0


def test_what_was_there_at_once_is_asked_for_earlier_until_it_is_not() -> None:
    expected = Expectation(estimator := ArrivalEstimator(deadline_s=60))
    expected.learn((0.0,), 1.0, 1.04, trip_s=0.04)
    asked_s = []
    for _ in range(12):
        asked_s.append(expected.due((0.0,)).due_s)
        expected.learn((0.0,), None, asked_s[-1])
    steps_s = [earlier - later for earlier, later in pairwise(asked_s)]
    assert steps_s[0] >= 0.9 * estimator.early_trips * 0.04
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(steps_s[:7]))
    assert asked_s[-1] == 0.0
