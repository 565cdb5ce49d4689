"""Which ways of synchronising a label needs at least, and which are more than any of its completions can use.

Ways are ordered: more requests, fewer seconds. What a way is worth depends on when the iteration ends, which in a
window of time is known within narrow limits: so of dozens of ways one or two are left for most labels.

By hand: an iteration ends between 10 and 10.1 s. Behind the forward passes, which take at least 4 s, a stage has done
its last backward after 5 s. So its sums may take 1.1 s at most: slower ways are too late. Another stage ends 5.9 s
after the forward passes, whatever this one does: ways that take less than 0.9 s cost requests and gain nothing. And a
way that saves 1 ms for 0.001 $ is not worth it where a second of an iteration costs no more than 0.1 $.
"""

from dataclasses import dataclass

import numpy as np

from funcpipe.partitioner.cost import Array, IntArray
from funcpipe.partitioner.cost.pipeline import ended_s, synchronised_s
from funcpipe.partitioner.search.completion_bounds import CompletionBounds
from funcpipe.partitioner.search.incumbents import Incumbents
from funcpipe.partitioner.search.labels import Labels

_ROUNDING = 1e-9
_MOST_USD_S = 1e12
"""What a second costs where nothing is known of it yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsefulWays:
    """What is the same for all labels of a window: `worth_it` is each option's last way that is worth its requests."""

    bounds: CompletionBounds
    latest_s: float
    worth_it: IntArray

    @staticmethod
    def of(bounds: CompletionBounds, incumbents: Incumbents) -> "UsefulWays":
        """For the labels of `bounds`. Where a slower plan may be useless or too late, all ways are worth it."""
        window = bounds.window
        options, table = window.network.options, window.network.options.ways
        last = np.full(len(options), table.columns - 1)
        if incumbents.slower_may_win:
            threshold_usd = float(incumbents.threshold_usd(np.array([window.low_s]))[0])
            second_usd = min(max(threshold_usd / window.low_s, window.second_usd), _MOST_USD_S)
            best = (table.usd_rows(options.row) + second_usd * table.seconds[options.row]).argmin(axis=1)
            slower_s = table.seconds[options.row, best] - table.seconds[options.row, -1]
            last = np.where(window.high_s + slower_s <= incumbents.latest_s, best, last)
        return UsefulWays(bounds=bounds, latest_s=min(window.high_s, incumbents.latest_s), worth_it=last)

    def range(self, labels: Labels, node: int) -> tuple[IntArray, IntArray]:
        """The first and the last way that a completion may need, for `labels` that have not synchronised yet."""
        bounds, tail, window = self.bounds, labels.tail, self.bounds.window
        options, repeats = window.network.options, window.network.repeats
        seconds = options.ways.seconds[options.row[labels.option]]
        begun_s = synchronised_s(tail.backward_s, tail.backward_lane_s, 0.0, repeats)
        forward_lane_s = np.maximum(tail.forward_lane_s, bounds.forward_lane_s[node])
        forward_s = ended_s(tail.forward_s + bounds.forward_s[node], forward_lane_s, 0.0, repeats)
        fewest = _first_within(seconds, self.latest_s * (1 + _ROUNDING) - forward_s - begun_s)
        if node == window.network.start:
            others_s = np.maximum(tail.finish_s, window.low_s * (1 - _ROUNDING) - forward_s)
        else:
            others_s = np.maximum(tail.finish_s, bounds.closed_s(labels, node))
        most = np.minimum(_first_within(seconds, others_s - begun_s), self.worth_it[labels.option])
        return fewest, np.maximum(most, fewest)


def _first_within(seconds: Array, limit_s: Array) -> IntArray:
    """For each row the first way that takes no longer than `limit_s`, or the fastest."""
    slower = (seconds > limit_s[:, None]).sum(axis=1)
    within: IntArray = np.minimum(slower, seconds.shape[1] - 1)
    return within
