"""The shares of a global batch's micro-batches for workers of different speeds."""

import heapq
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def counts_by_speed(items: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Each worker's number of `items` equal pieces of work, so that the last one ends as early as possible.

    Each piece goes to the worker that would end it first, which is optimal for equal pieces; the first worker on a tie.
    """
    counts = [0] * len(speeds)
    ends = [(1 / speed, i) for i, speed in enumerate(speeds)]
    heapq.heapify(ends)
    for _ in range(items):
        _, i = ends[0]
        counts[i] += 1
        heapq.heapreplace(ends, ((counts[i] + 1) / speeds[i], i))
    return tuple(counts)


def deal(items: Sequence[T], speeds: Sequence[float]) -> tuple[tuple[T, ...], ...]:
    """`items` in order, cut into a run of neighbours for each worker, by speed; slow workers may get none."""
    parts, start = [], 0
    for count in counts_by_speed(len(items), speeds):
        parts.append(tuple(items[start : start + count]))
        start += count
    return tuple(parts)
