from hypothesis import given
from hypothesis import strategies as st

from funcpipe.comm.patience import Expectation, Patience


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 10), st.floats(0, 1))
def test_pauses_stay_within_their_bounds(since_s: float, due_s: float, spread_s: float, trip_s: float) -> None:
    patience = Patience(deadline_s=60)
    pause_s = patience.pause_s(since_s, due_s, spread_s, trip_s)
    assert patience.least_s <= pause_s <= max(patience.most_s, due_s - since_s, spread_s / 2, 0.005 * due_s)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=10))
def test_an_expectation_lies_within_what_was_seen(waits: list[tuple[float, float]]) -> None:
    expected = Expectation(Patience(deadline_s=60))
    for one, other in waits:
        expected.learn(min(one, other), max(one, other))
    last = waits[-4:]
    assert min((min(pair) for pair in last), default=0) <= expected.due_s
    assert expected.due_s + expected.spread_s <= max((max(pair) for pair in last), default=0)
