"""Which ways of synchronising a label needs at least, and which are more than any of its completions can use.

Ways are ordered: more requests, fewer seconds. What a way is worth depends on when the iteration ends, which in a
window of time is known within narrow limits: so of dozens of ways one or two are left for most labels.

By hand: an iteration ends between 10 and 10.1 s. Behind the forward passes, which take at least 4 s, a stage has done
its last backward after 5 s. So its sums may take 1.1 s at most: slower ways are too late. Another stage ends 5.9 s
after the forward passes, whatever this one does: ways that take less than 0.9 s cost requests and gain nothing.
"""

import numpy as np

from funcpipe.partitioner.cost.arrays import Array, IntArray
from funcpipe.partitioner.cost.pipeline import ended_s, synchronised_s
from funcpipe.partitioner.search.completion_bounds import CompletionBounds
from funcpipe.partitioner.search.incumbents import Incumbents
from funcpipe.partitioner.search.labels import Labels

_ROUNDING = 1e-9


def useful_ways(
    labels: Labels, bounds: CompletionBounds, node: int, incumbents: Incumbents
) -> tuple[IntArray, IntArray]:
    """The first and the last way that a completion may need, for `labels` that have not synchronised their option."""
    window, tail, options = bounds.window, labels.tail, bounds.window.network.options
    repeats = window.network.repeats
    seconds = options.ways.seconds[options.row[labels.option]]
    begun_s = synchronised_s(tail.backward_s, tail.backward_lane_s, 0.0, repeats)
    forward_lane_s = np.maximum(tail.forward_lane_s, bounds.forward_lane_s[node])
    forward_s = ended_s(tail.forward_s + bounds.forward_s[node], forward_lane_s, 0.0, repeats)
    latest_s = min(window.high_s, incumbents.latest_s) * (1 + _ROUNDING)
    fewest = _first_within(seconds, latest_s - forward_s - begun_s)
    if node == window.network.start:
        others_s = np.maximum(tail.finish_s, window.low_s * (1 - _ROUNDING) - forward_s)
    else:
        slowest_s = np.maximum(tail.backward_lane_s, bounds.backward_lane_s[node])
        others_s = np.maximum(tail.finish_s, synchronised_s(tail.backward_s, slowest_s, bounds.closing_s[node], repeats))
    most = np.maximum(_first_within(seconds, others_s - begun_s), fewest)
    return fewest, most


def _first_within(seconds: Array, limit_s: Array) -> IntArray:
    """For each row the first way that takes no longer than `limit_s`, or the fastest."""
    slower: IntArray = (seconds > limit_s[:, None]).sum(axis=1)
    return np.minimum(slower, seconds.shape[1] - 1)
