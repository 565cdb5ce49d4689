"""The elements of a flat gradient that the pieces of a synchronisation hold."""

from collections.abc import Iterator

from funcpipe.comm.sum_pattern import Pattern, split_ranges


def piece_ranges(
    length: int, pattern: Pattern, head: int = 0, unit: int = 1
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the elements [start, stop) of each piece: one row for each round, one column for each split.

    Rounds go from the end of the gradient to its beginning, the order in which a backward pass makes it. The first
    `head` elements, which are known only at the end, belong to the last round. Behind the head, pieces begin at
    multiples of `unit` elements.

    For example, 10 elements, of which the first 2 are the head, in two rounds of two splits: the rounds are 6-10 and
    0-6, and their pieces 6-8 and 8-10, then 0-3 and 3-6.
    """
    rounds = round_ranges(length, pattern, head, unit)
    return tuple(tuple(_within(start, stop, pattern.splits, head, unit)) for start, stop in rounds)


def round_ranges(length: int, pattern: Pattern, head: int = 0, unit: int = 1) -> tuple[tuple[int, int], ...]:
    """Return the elements [start, stop) of each round, the last elements first."""
    rounds = _unit_ranges(length - head, pattern.streams.rounds, unit)
    return tuple((head + start if i else 0, head + stop) for i, (start, stop) in enumerate(rounds))[::-1]


def _within(start: int, stop: int, splits: int, head: int, unit: int) -> Iterator[tuple[int, int]]:
    if unit == 1:
        for first, last in split_ranges(stop - start, splits):
            yield start + first, start + last
        return
    border = max(start, head)
    for number, (first, last) in enumerate(_unit_ranges(stop - border, splits, unit)):
        yield border + first if number else start, border + last


def _unit_ranges(length: int, count: int, unit: int) -> list[tuple[int, int]]:
    """Cut `length` elements into `count` ranges that begin at multiples of `unit`."""
    ranges = split_ranges(-(-length // unit), count)
    return [(min(start * unit, length), min(stop * unit, length)) for start, stop in ranges]
