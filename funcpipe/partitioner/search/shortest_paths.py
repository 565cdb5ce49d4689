"""Shortest paths over a field of options, for many weights and many caps on the lanes at once.

A path's seconds are sums plus repeats of its slowest lane. If no lane may be slower than a cap, the slowest lane is a
constant and what is left is a sum, which a shortest path makes as small as can be. Doing this for a ladder of caps
leaves one relaxed: between two rungs the slowest lane counts as the lower one.
"""

from dataclasses import dataclass

import numpy as np

from funcpipe.partitioner.cost.formulas import Array
from funcpipe.partitioner.problem.stage_graph import IntArray
from funcpipe.partitioner.search.option_network import OptionNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Caps on an option's slowest lanes, in ascending order, and the least lane above the cap before.

    `barred` is infinite where an option's lanes are above a cap, else 0; `rung` is the first cap that admits an option.
    """

    caps_s: Array
    lows_s: Array
    barred: Array
    rung: IntArray


def ladder(field: OptionNetwork, rungs: int) -> Ladder:
    """A ladder of at most `rungs` caps among the lanes of `field`, so that the highest admits all."""
    lane_s = field.lane_s
    values = np.unique(lane_s) if field.repeats else lane_s.max(keepdims=True)
    picked = np.unique(np.linspace(-1, len(values) - 1, min(rungs, len(values)) + 1).round().astype(np.int64)[1:])
    caps_s = values[picked]
    lows_s = values[np.concatenate([[0], picked[:-1] + 1])]
    return Ladder(
        caps_s=caps_s,
        lows_s=lows_s if field.repeats else np.zeros(1),
        barred=np.where(lane_s[:, None] > caps_s, np.inf, 0.0),
        rung=np.searchsorted(caps_s, lane_s),
    )


def to_end(field: OptionNetwork, weights: Array, barred: Array) -> Array:
    """Element [n, w, g]: the least sum of weights w on a path from node n to the end, under cap g."""
    least = np.full((field.start + 1, weights.shape[1], barred.shape[1]), np.inf)
    least[0] = 0.0
    after = field.options.after
    for node in range(1, field.start + 1):
        low, high = field.leaving[node], field.leaving[node + 1]
        if low < high:
            sums = least[after[low:high]]
            sums += weights[low:high, :, None]
            sums += barred[low:high, None, :]
            sums.min(axis=0, out=least[node])
    return least


def from_start(field: OptionNetwork, weights: Array, barred: Array) -> Array:
    """Element [n, w, g]: the least sum of weights w on a path from the start to node n, under cap g."""
    least = np.full((field.start + 1, weights.shape[1], barred.shape[1]), np.inf)
    least[field.start] = 0.0
    before = field.options.before[field.by_after]
    weights, barred = weights[field.by_after], barred[field.by_after]
    for node in range(field.start - 1, -1, -1):
        low, high = field.entering[node], field.entering[node + 1]
        if low < high:
            sums = least[before[low:high]]
            sums += weights[low:high, :, None]
            sums += barred[low:high, None, :]
            sums.min(axis=0, out=least[node])
    return least


def shortest_paths(field: OptionNetwork, weights: Array, barred: Array, least: Array) -> IntArray:
    """The paths behind `least` = to_end(...) from the start, each once: a column of options for each, then −1."""
    shape = least.shape[1:]
    columns = np.flatnonzero(np.isfinite(least[field.start].ravel()))
    weight, cap = np.unravel_index(columns, shape)
    node = np.full(len(columns), field.start)
    steps = []
    while (node > 0).any():
        option = _steps(field, weights, barred, least, node, weight, cap)
        steps.append(option)
        node = np.where(option >= 0, field.options.after[option], 0)
    if not steps:
        return np.empty((0, 0), dtype=np.int64)
    return np.unique(np.stack(steps), axis=1)


def _steps(
    field: OptionNetwork, weights: Array, barred: Array, least: Array, node: IntArray, weight: IntArray, cap: IntArray
) -> IntArray:
    """For each column the option that the shortest path takes at its node; −1 at the end."""
    option = np.full(len(node), -1)
    for here in np.unique(node[node > 0]):
        which = np.flatnonzero(node == here)
        low, high = field.leaving[here], field.leaving[here + 1]
        sums = least[field.options.after[low:high]][:, weight[which], cap[which]]
        sums += weights[low:high][:, weight[which]]
        sums += barred[low:high][:, cap[which]]
        option[which] = low + sums.argmin(axis=0)
    return option
