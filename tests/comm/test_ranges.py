from hypothesis import given
from hypothesis import strategies as st

from funcpipe.comm.collectives import pattern
from funcpipe.comm.piece_ranges import piece_ranges, round_ranges
from funcpipe.comm.sum_pattern import Pattern
from funcpipe.core import Streams, Sync

streams = st.builds(Streams, st.integers(1, 6), st.integers(1, 8), st.integers(1, 6))
patterns = st.builds(pattern, st.sampled_from(Sync), st.integers(2, 9), st.none() | streams)


@given(st.integers(0, 500), patterns)
def test_pieces_cover_the_vector_once(length: int, chosen: Pattern) -> None:
    ranges = [piece for row in piece_ranges(length, chosen) for piece in row]
    assert sorted(i for start, stop in ranges for i in range(start, stop)) == list(range(length))
    assert len(ranges) == chosen.streams.rounds * chosen.splits


@given(st.integers(0, 500), patterns, st.integers(0, 500), st.integers(1, 40))
def test_pieces_behind_the_head_begin_at_multiples_of_the_unit(
    length: int, chosen: Pattern, head: int, unit: int
) -> None:
    head = min(head, length)
    rows = piece_ranges(length, chosen, head, unit)
    assert sorted(i for row in rows for start, stop in row for i in range(start, stop)) == list(range(length))
    assert [(row[0][0], row[-1][1]) for row in rows] == list(round_ranges(length, chosen, head, unit))
    assert rows[-1][0][0] == 0
    if unit > 1:
        begins = [start for row in rows for start, stop in row if start > 0 and stop > start]
        assert all((start - head) % unit == 0 for start in begins)


def test_two_rounds_of_two_splits() -> None:
    chosen = pattern(Sync.STREAMED, 2, Streams(2, 1, 1))
    assert piece_ranges(10, chosen, 2) == (((6, 8), (8, 10)), ((0, 3), (3, 6)))
    assert piece_ranges(10, chosen, 2, 3) == (((8, 10), (10, 10)), ((0, 5), (5, 8)))
