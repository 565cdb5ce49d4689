"""Dominance: whether one label makes another one of its node useless, however both are completed.

Let A and B be labels of a node, and complete both by the same stages in front. Let T and Q be the seconds, and the
dollars per second, of the plan that B becomes. What happens in front depends on the labels only through a few numbers,
so the plan that A becomes takes at most `slower_s` more seconds than B's: the largest of

- the difference of all their lanes, plus what the slowest lanes may add, where only that part of a slow lane counts
  which no stage in front is sure to override;
- the difference of when they have synchronised, or of their forward lanes, plus what the slowest of these may add, and
  in steps without a meeting the slowest backward lanes;
- the difference of their work, where functions share processors.

A's functions cost `more_usd_s` more dollars a second (which may be negative). Then A's plan costs at most

    slower_s · (Q + more_usd_s) + more_usd_s · T + difference of requests

dollars more than B's. The requests depend on when stages must have synchronised: of all ends between which B's may lie,
the largest difference counts between A's dollars for ending by the first of two neighbours, and B's by the second
(`Labels.in_time_usd`); where A cannot end so early, its end counts in `slower_s`. In a time window T and Q are known
within narrow limits, so this is hardly larger than the true difference. If it is at most 0 for all T and Q of the
window, A dominates B: seconds and dollars are weighed against each other, and few labels survive.

By hand, at T between 10 and 11 s and Q between 4 and 5 $/s: A is 1 s slower but 1 $/s cheaper than B. The difference is
at most 1 · (5 − 1) − 1 · 10 = −6 $, so A dominates B.

Where a slower plan is never better for being cheaper (under a budget, and on a Pareto front), only labels that are not
slower dominate.
"""

from dataclasses import dataclass

import numpy as np

from funcpipe.partitioner.cost import Array, BoolArray, IntArray
from funcpipe.partitioner.search.completion_bounds import CompletionBounds
from funcpipe.partitioner.search.incumbents import Incumbents
from funcpipe.partitioner.search.labels import Labels

_ROUNDING = 1e-9
_SKIPPED = 8
"""Of how many ends one is compared first, for all labels; the others only where it does not decide."""
_LEAST_GAIN = 1e-12
"""A slower label must be cheaper by this share of the threshold: more than rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dominance:
    """The labels of a node, prepared to be compared; arrays with an element for each label.

    T lies between `low_s` and `high_s`, Q between `low_usd_s` and `high_usd_s`. What A takes longer there and back than
    B, the stages in front may have to wait for in every round: `rounds` times.
    """

    whole_s: Array
    forward_s: Array
    finished_s: Array
    work_s: Array
    forward_lane_s: Array
    backward_lane_s: Array
    price_usd_s: Array
    request_usd: Array
    in_time_usd: Array
    needed_usd: Array
    low_s: float
    high_s: float
    low_usd_s: float
    high_usd_s: float
    rounds: float
    local_share: float
    most_slower_s: float
    least_gain_usd: float

    @staticmethod
    def of(labels: Labels, bounds: CompletionBounds, node: int, incumbents: Incumbents) -> "Dominance":
        """The `labels` of a node, where `bounds` say what lies before it."""
        window, tail = bounds.window, labels.tail
        setting, repeats = window.network.setting, window.network.repeats
        forward_lane_s = repeats * np.maximum(tail.forward_lane_s, bounds.forward_lane_s[node])
        # a stage in front synchronises after the backwards of itself and of those behind it: of the other stages in
        # front, only the one right before the node is sure to be among these
        backward_lane_s = repeats * np.maximum(tail.backward_lane_s, bounds.next_backward_lane_s[node])
        closed_s = bounds.closed_s(labels, node)
        threshold_usd = float(incumbents.threshold_usd(np.array([window.low_s]))[0])
        return Dominance(
            whole_s=tail.forward_s + tail.backward_s,
            forward_s=tail.forward_s,
            finished_s=tail.forward_s + np.maximum(tail.finish_s, closed_s),
            work_s=setting.seconds_per_work * tail.work_s,
            forward_lane_s=forward_lane_s,
            backward_lane_s=backward_lane_s,
            price_usd_s=tail.price_usd_s,
            request_usd=tail.request_usd,
            in_time_usd=labels.in_time_usd[:, :-1],
            needed_usd=_needed_usd(labels, bounds.ends_s, closed_s),
            low_s=window.low_s,
            high_s=window.high_s,
            low_usd_s=window.second_usd,
            high_usd_s=max(threshold_usd / window.low_s, window.second_usd),
            rounds=repeats * float(bounds.next_share[node]),
            local_share=1 - setting.meeting_share,
            most_slower_s=max(0.0, incumbents.latest_s - window.high_s) if incumbents.slower_may_win else 0.0,
            least_gain_usd=_LEAST_GAIN * threshold_usd,
        )

    def dominated(self, these: IntArray, those: IntArray) -> BoolArray:
        """Element [i, j]: whether label these[i] makes label those[j] useless."""

        def more(values: Array) -> Array:
            result: Array = values[these][:, None] - values[those]
            return result

        whole_s = more(self.whole_s)
        forward_lane_s = np.maximum(np.maximum(more(self.forward_lane_s), self.rounds * whole_s), 0.0)
        backward_lane_s = np.maximum(more(self.backward_lane_s), 0.0)
        ended_s = np.maximum(more(self.finished_s), more(self.forward_s)) + forward_lane_s
        slower_s = whole_s + forward_lane_s + backward_lane_s
        slower_s = np.maximum(slower_s, ended_s + self.local_share * backward_lane_s)
        slower_s = np.maximum(slower_s, more(self.work_s))
        more_usd_s = more(self.price_usd_s)
        more_usd = more_usd_s * np.where(more_usd_s > 0, self.high_s, self.low_s) + more(self.request_usd)
        more_usd += slower_s * (np.where(slower_s > 0, self.high_usd_s, self.low_usd_s) + more_usd_s)
        limit_usd = np.where(slower_s <= 0, 0.0, -self.least_gain_usd)
        limit_usd[slower_s > self.most_slower_s] = -np.inf
        few = slice(None, None, -_SKIPPED)
        dominated = more_usd + self._more_in_time_usd(these, those, few) <= limit_usd
        this, that = np.nonzero(dominated)
        in_time_usd = (self.in_time_usd[these[this]] - self.needed_usd[those[that]]).max(axis=1)
        dominated[this, that] = more_usd[this, that] + in_time_usd <= limit_usd[this, that]
        return dominated

    def _more_in_time_usd(self, these: IntArray, those: IntArray, ends: slice) -> Array:
        """The most that stages of A cost more than those of B to end no later, of some `ends` between which B's lie."""
        in_time_usd, needed_usd = self.in_time_usd[these, ends], self.needed_usd[those, ends]
        most = in_time_usd[:, :1] - needed_usd[:, 0]
        for end in range(1, needed_usd.shape[1]):
            np.maximum(most, in_time_usd[:, end, None] - needed_usd[:, end], out=most)
        return most


def _needed_usd(labels: Labels, ends_s: Array, closed_s: Array) -> Array:
    """The least that a label pays for ending between an end and the next, for each but the last; infinite where it
    cannot end so early, with stages in front that have not synchronised before `closed_s`.
    """
    earliest_s = np.maximum(labels.tail.finish_s, closed_s) * (1 - _ROUNDING)
    needed_usd = np.where(ends_s[1:] < earliest_s[:, None], np.inf, labels.in_time_usd[:, 1:])
    needed_usd[:, -1] = labels.in_time_usd[:, -1]
    return needed_usd
