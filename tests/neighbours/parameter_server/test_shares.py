import itertools

from hypothesis import given
from hypothesis import strategies as st

from funcpipe.neighbours.parameter_server.loops import counts_by_speed, deal

SPEEDS = st.lists(st.floats(0.25, 8.0), min_size=1, max_size=4)


@given(items=st.integers(0, 7), speeds=SPEEDS)
def test_no_other_division_ends_earlier(items: int, speeds: list[float]) -> None:
    counts = counts_by_speed(items, speeds)
    assert sum(counts) == items
    ends = [max(n / s for n, s in zip(other, speeds, strict=True)) for other in _divisions(items, len(speeds))]
    assert max(n / s for n, s in zip(counts, speeds, strict=True)) <= min(ends) * (1 + 1e-9)


@given(items=st.integers(0, 40), speeds=SPEEDS)
def test_shares_are_runs_of_neighbours_in_order(items: int, speeds: list[float]) -> None:
    parts = deal(range(items), speeds)
    assert len(parts) == len(speeds)
    assert list(itertools.chain(*parts)) == list(range(items))


def test_shares_follow_speeds() -> None:
    assert counts_by_speed(8, [3.0, 1.0]) == (6, 2)
    assert counts_by_speed(2, [10.0, 1.0]) == (2, 0)


def _divisions(items: int, workers: int) -> list[tuple[int, ...]]:
    return [c for c in itertools.product(range(items + 1), repeat=workers) if sum(c) == items]
