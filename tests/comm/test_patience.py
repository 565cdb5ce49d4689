from hypothesis import given
from hypothesis import strategies as st

from funcpipe.comm.patience import Expectation, Patience


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 10), st.floats(0.01, 100))
def test_pauses_stay_within_their_bounds(waited_s: float, due_s: float, spread_s: float, deadline_s: float) -> None:
    patience = Patience(deadline_s=deadline_s)
    pause_s = patience.pause_s(waited_s, due_s, spread_s)
    assert 0 <= pause_s <= max(patience.most_s, due_s - waited_s, 0.25 * spread_s + spread_s / 2, 0.03 * due_s)
    assert waited_s + pause_s <= max(deadline_s, waited_s) * (1 + 1e-12)
    if waited_s < min(due_s, deadline_s):
        assert pause_s > 0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=10))
def test_an_expectation_lies_within_what_was_seen(waits: list[tuple[float, float]]) -> None:
    expected = Expectation(Patience(deadline_s=60))
    for one, other in waits:
        expected.learn(min(one, other), max(one, other))
    last = waits[-4:]
    assert min((min(pair) for pair in last), default=0) <= expected.due_s
    assert expected.due_s + expected.spread_s <= max((max(pair) for pair in last), default=0)
