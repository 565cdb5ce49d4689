"""Groups of labels of a node that differ little, and one label that stands for a group.

Labels are points: their seconds there and back, slowest lanes, end, and price, all in dollars of the window. Points in
the same cell of a grid are alike. The grid is the finest of a series that has few enough cells.

By hand, with cells half as large each time: labels at 0, 1, 2, 9 and 10 $ in a single dimension, at most three groups.
Cells of 10 $ give two groups, cells of 5 and 2.5 $ three ({0, 1, 2}, {9}, {10}), and cells of 1.25 $ would give four.
"""

import math

import numpy as np

from funcpipe.partitioner.cost import Array, IntArray
from funcpipe.partitioner.cost.pipeline import PlanTail
from funcpipe.partitioner.search.completion_bounds import CompletionBounds
from funcpipe.partitioner.search.labels import Labels

_FINER = 1.4
"""How much smaller the cells of a grid are than those of the one before."""
_GRIDS = 60
_CELLS = 2**62
"""How many grids are tried at most, and of how many cells."""


def alike(labels: Labels, bounds: CompletionBounds, node: int, count: int) -> IntArray:
    """For each label of `node` the number of its group, of `count` at most; labels in a group have as many stages.

    There may be more groups than `count` where there are more numbers of stages.
    """
    if len(labels) <= count:
        return np.arange(len(labels))
    return grouped(_points(labels, bounds, node), labels.stages, count)


def grouped(points: Array, kind: IntArray, count: int) -> IntArray:
    """The group of each point (a column): its cell in the finest grid in which the points fill at most `count` cells.

    Points of different kinds are in different groups, in whatever grid.
    """
    points = points - points.min(axis=1, keepdims=True)
    kinds, kind_of = np.unique(kind, return_inverse=True)
    groups = kind_of
    size = float(points.max())
    for _ in range(_GRIDS if size > 0 else 0):
        size /= _FINER
        cells = (points / size).astype(np.int64)
        shape = (len(kinds), *(cells.max(axis=1) + 1).tolist())
        if math.prod(shape) > _CELLS:
            break
        _, finer = np.unique(np.ravel_multi_index((kind_of, *cells), shape), return_inverse=True)
        if finer.max() >= count:
            break
        groups = finer
    return groups


def merged(labels: Labels, group: IntArray) -> Labels:
    """For each group a label no worse than any of it; it has no option of its own and no parent."""
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))

    def least(values: Array) -> Array:
        found: Array = np.minimum.reduceat(values[order], starts, axis=0)
        return found

    none = np.full(len(starts), -1)
    return Labels(
        tail=PlanTail(*map(least, labels.tail)),
        option=none,
        parent=none,
        in_time_usd=least(labels.in_time_usd),
        mean_usd=least(labels.mean_usd),
        stages=labels.stages[order][starts],
    )


def _points(labels: Labels, bounds: CompletionBounds, node: int) -> Array:
    """What the labels differ in, in dollars: a row for each kind."""
    window, tail = bounds.window, labels.tail
    repeats = window.network.repeats
    forward_lane_s = np.maximum(tail.forward_lane_s, bounds.forward_lane_s[node])
    backward_lane_s = np.maximum(tail.backward_lane_s, bounds.backward_lane_s[node])
    seconds = [
        tail.forward_s + tail.backward_s,
        repeats * forward_lane_s,
        repeats * backward_lane_s,
        tail.forward_s + np.maximum(tail.finish_s, bounds.closed_s(labels, node)),
    ]
    return np.stack([*(window.slope_usd * each for each in seconds), window.low_s * tail.price_usd_s])
