"""The least that any completion of a partial plan takes, and which partial plans are worth keeping.

For each node, shortest paths from the start give the least dollars, seconds and slowest lanes of what comes before it.
Together with a label at the node they bound every plan that the label can become, from below. As in `time_window`, the
seconds are bounded in four ways, each with its own least dollars: *timed* (all lanes, with the caps on the slowest),
*finished* (the label's own synchronisation, then only forwards lie before it), *untimed* (`low_s`), *worked*.

By hand, in seconds alone: before a node lie at least 5 s of lanes, with a slowest lane of at least 1 s, and two
micro-batches follow the first. A label of 4 s in all whose slowest lanes take 2 s becomes a plan of at least
5 + 4 + 2 · 2 = 13 s.

`UsefulWays`: ways of synchronising are ordered by requests, and more requests take fewer seconds. What a way is worth
depends on when the iteration ends, which in a window is known within narrow limits: so of dozens of ways one or two are
left for most labels. By hand: an iteration ends between 10 and 10.1 s. Behind the forward passes, which take at least
4 s, a stage has done its last backward after 5 s. So its sums may take 1.1 s at most: slower ways are too late. Another
stage ends 5.9 s after the forward passes, whatever this one does: ways that take less than 0.9 s cost requests and gain
nothing. And a way that saves 1 ms for 0.001 $ is not worth it where a second of an iteration costs no more than 0.1 $.

`Promising`: a label is worth keeping if one of its completions may be better than the best plans known and lie in the
window. A complete plan pays for the requests that its end needs: of all ends that it may have, one must be good enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from funcpipe.partitioner.cost import Array, BoolArray, IntArray
from funcpipe.partitioner.cost.pipeline import dollars, ended_s, synchronised_s
from funcpipe.partitioner.search.incumbents import Incumbents
from funcpipe.partitioner.search.initial_bounds import closing_s, closing_usd, from_start, in_front, lane_caps
from funcpipe.partitioner.search.labels import Labels, extended, with_ways
from funcpipe.partitioner.search.option_network import OptionNetwork
from funcpipe.partitioner.search.time_window import TimeWindow

_CAPS = 48
_ENDS = 32
"""For how many ends labels know their cheapest ways of synchronising."""

_SCALES = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Factors of the weights of the ends before a node; what is left to 1 is the weight of the label's end."""


class _Ahead(IntEnum):
    """Sums along paths from the start: the columns of their weights, after those of `_SCALES`."""

    UNTIMED_USD = len(_SCALES)
    WORKED_USD = len(_SCALES) + 1
    TIMED_S = len(_SCALES) + 2
    CLOSING_S = len(_SCALES) + 3
    FORWARD_S = len(_SCALES) + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionBounds:
    """The least that lies before each node; arrays with an element for each node.

    `in_front` holds the weights of the layers before the node. `timed_usd[n, i, g]` holds dollars if no forward lane
    before node n exceeds cap g, with weights of scale i; `later_timed_usd[n, i, g]` the least of cap g and all higher
    ones, with the dollars of the slowest lane. The fields in seconds are the least sum, or the least slowest lane, of
    any path from the start to the node; `next_backward_lane_s` and `next_share` are of the stage right before the node
    alone.
    """

    window: TimeWindow
    ends_s: Array
    in_front: Array
    least_lane_s: Array
    timed_usd: Array
    later_timed_usd: Array
    untimed_usd: Array
    worked_usd: Array
    timed_s: Array
    closing_s: Array
    forward_s: Array
    forward_lane_s: Array
    backward_lane_s: Array
    next_backward_lane_s: Array
    next_share: Array

    def earliest_s(self, labels: Labels, node: int) -> Array:
        """The least seconds of an iteration of any completion."""
        repeats, tail = self.window.network.repeats, labels.tail
        forward_lane_s = np.maximum(tail.forward_lane_s, self.forward_lane_s[node])
        end_s = self.timed_s[node] + self._mean_end_s(labels, float(self.in_front[node]))
        timed_s = ended_s(tail.forward_s, forward_lane_s, end_s, repeats)
        finish_s = tail.finish_s + self.local_lane_s(labels, node)
        finished_s = ended_s(tail.forward_s + self.forward_s[node], forward_lane_s, finish_s, repeats)
        result: Array = np.maximum(timed_s, finished_s)
        return result

    def local_lane_s(self, labels: Labels, node: int) -> Array:
        """The least that the slowest backward lane adds in steps without a meeting."""
        found: Array = np.maximum(labels.tail.backward_lane_s, self.backward_lane_s[node])
        return self.window.network.setting.local_repeats * found

    def closed_s(self, labels: Labels, node: int) -> Array:
        """When the stages before the node have synchronised at the earliest, counted like `finish_s`."""
        slowest_s = np.maximum(labels.tail.backward_lane_s, self.backward_lane_s[node])
        found: Array = synchronised_s(
            labels.tail.backward_s, slowest_s, self.closing_s[node], self.window.network.meeting_repeats
        )
        return found

    def cheapest_usd(self, labels: Labels, node: int) -> Array:
        """The least dollars of any completion that lies in the window, value of time included."""
        window, tail = self.window, labels.tail
        untimed = self.untimed_usd[node] + window.untimed_usd
        worked = self.worked_usd[node] + window.work_usd_s * tail.work_s
        seconds_usd = np.maximum(np.maximum(self._timed_usd(labels, node), untimed), worked)
        paid_usd = dollars(tail.price_usd_s, window.low_s, tail.request_usd)
        found: Array = seconds_usd + paid_usd + window.offset_usd
        return found

    def _timed_usd(self, labels: Labels, node: int) -> Array:
        """The least dollars for seconds, and for what lies before the node, with the weights that say most."""
        second_usd, repeats = self.window.slope_usd, self.window.network.repeats
        tail, lane_s = labels.tail, labels.tail.forward_lane_s
        cap = np.searchsorted(self.least_lane_s, lane_s, side="right")
        own_cap, own_usd = np.maximum(cap - 1, 0), second_usd * repeats * lane_s
        most = np.full(len(labels), -np.inf)
        for i, scale in enumerate(_SCALES):
            share = scale * float(self.in_front[node])
            if share <= 1.0:
                # the slowest lane is the label's own under the caps up to it, and one before the node under higher caps
                own_lane = np.where(cap > 0, self.timed_usd[node, i][own_cap] + own_usd, np.inf)
                lanes = np.minimum(own_lane, self.later_timed_usd[node, i][cap])
                most = np.maximum(most, second_usd * self._mean_end_s(labels, share) + lanes)
        found: Array = most + second_usd * tail.forward_s
        return found

    def _mean_end_s(self, labels: Labels, share: float) -> Array:
        """The label's part of the weighted mean of all ends, of which a share lies before it and waits for its
        backward.
        """
        tail, local_repeats = labels.tail, self.window.network.setting.local_repeats
        found: Array = share * tail.backward_s + (1 - share) * (tail.finish_s + local_repeats * tail.backward_lane_s)
        return found


def completion_bounds(window: TimeWindow) -> CompletionBounds:
    """The least that lies before each node of the window's network."""
    network, costs, second_usd = window.network, window.network.costs, window.slope_usd
    caps = lane_caps(network, _CAPS)
    priced_usd, weights = window.priced_usd, window.weights
    columns = [
        priced_usd + second_usd * costs.forward_sum_s + closing_usd(network, scale * weights, second_usd)
        for scale in _SCALES
    ]
    columns += [priced_usd, priced_usd + window.work_usd_s * costs.work_s]
    columns += [costs.forward_sum_s + closing_s(network, weights), network.closing_s, costs.forward_sum_s]
    ahead = from_start(network, np.stack(columns, axis=1), caps.excluded)
    timed_usd, any_lane = ahead[:, : len(_SCALES)], ahead[:, :, -1]
    with_lanes = timed_usd + second_usd * network.repeats * caps.least_lane_s
    later = np.minimum.accumulate(with_lanes[:, :, ::-1], axis=2)[:, :, ::-1]
    backward_lane_s = _least_peak(network, costs.backward_lane_s)
    first_s = any_lane[0, _Ahead.CLOSING_S] + network.meeting_repeats * backward_lane_s[0]
    forward_s = any_lane[0, _Ahead.FORWARD_S] + network.repeats * caps.least_lane_s[0]
    return CompletionBounds(
        window=window,
        ends_s=_ends_s(first_s, window.high_s - forward_s, network.options.ways.columns),
        in_front=in_front(network, weights),
        least_lane_s=caps.least_lane_s,
        timed_usd=timed_usd,
        later_timed_usd=np.concatenate([later, np.full((*later.shape[:2], 1), np.inf)], axis=2),
        untimed_usd=any_lane[:, _Ahead.UNTIMED_USD],
        worked_usd=any_lane[:, _Ahead.WORKED_USD],
        timed_s=any_lane[:, _Ahead.TIMED_S],
        closing_s=any_lane[:, _Ahead.CLOSING_S],
        forward_s=any_lane[:, _Ahead.FORWARD_S],
        forward_lane_s=_least_peak(network, costs.forward_lane_s),
        backward_lane_s=backward_lane_s,
        next_backward_lane_s=_least_entering(network, costs.backward_lane_s),
        next_share=_least_entering(network, costs.share),
    )


def _ends_s(first_s: float, last_s: float, ways: int) -> Array:
    """Ends from 0 to the last there is, most of them between `first_s` and `last_s`; only these two with one way.

    Where no path is left, `first_s` is infinite, and no end matters.
    """
    if ways == 1 or not np.isfinite(first_s):
        return np.array([0.0, max(last_s, 0.0)])
    return np.array([0.0, *np.linspace(min(first_s, last_s), last_s, _ENDS)])


def _least_entering(network: OptionNetwork, values: Array) -> Array:
    """For each node the least value of an option that leads to it; 0 where there is none."""
    least = np.full(network.start + 1, np.inf)
    np.minimum.at(least, network.options.after, values)
    return np.where(np.isfinite(least), least, 0.0)


def _least_peak(network: OptionNetwork, peak: Array) -> Array:
    """For each node the least that the greatest `peak` on a path from the start to it can be; 0 where there is none."""
    least = np.full(network.start + 1, np.inf)
    least[network.start] = 0.0
    for node in range(network.start - 1, -1, -1):
        entering = network.by_after[network.entering[node] : network.entering[node + 1]]
        if len(entering):
            least[node] = np.maximum(least[network.options.before[entering]], peak[entering]).min()
    return np.where(np.isfinite(least), least, 0.0)


_ROUNDING = 1e-9
_MOST_USD_S = 1e12
"""The price of a second where nothing is known of it yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsefulWays:
    """The ways that labels of a window may use: `worth_it` is each option's last way that is worth its requests."""

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
        begun_s = synchronised_s(tail.backward_s, tail.backward_lane_s, 0.0, window.network.meeting_repeats)
        forward_lane_s = np.maximum(tail.forward_lane_s, bounds.forward_lane_s[node])
        local_s = bounds.local_lane_s(labels, node)
        forward_s = ended_s(tail.forward_s + bounds.forward_s[node], forward_lane_s, local_s, repeats)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Promising:
    """The labels of a window that may become better plans than the `incumbents`."""

    bounds: CompletionBounds
    useful: UsefulWays
    incumbents: Incumbents

    @staticmethod
    def of(window: TimeWindow, incumbents: Incumbents, *, ends: bool = True) -> "Promising":
        """Those of `window`; without `ends`, labels do not know what they pay for each end."""
        bounds = completion_bounds(window)
        if not ends:
            bounds = replace(bounds, ends_s=bounds.ends_s[:1])
        return Promising(bounds=bounds, useful=UsefulWays.of(bounds, incumbents), incumbents=incumbents)

    def of_end(self) -> Labels:
        """The empty plan."""
        return Labels.of_end(len(self.bounds.ends_s))

    def at(self, node: int, at_node: Sequence[Labels]) -> Labels:
        """The labels of `node`: each option that leaves it, in front of each label of the node to which it leads."""
        network = self.bounds.window.network
        labels = self._kept(extended(network, node, at_node), node)
        labels = with_ways(labels, network, *self.useful.range(labels, node), self.bounds.ends_s)
        return self._kept(labels, node)

    def _kept(self, labels: Labels, node: int) -> Labels:
        window, incumbents = self.bounds.window, self.incumbents
        earliest_s = self.bounds.earliest_s(labels, node)
        threshold_usd = incumbents.threshold_usd(np.maximum(earliest_s, window.low_s))
        promising = self.bounds.cheapest_usd(labels, node) < threshold_usd
        return labels.take(promising & (earliest_s <= min(window.high_s, incumbents.latest_s)))

    def good_ends(self, labels: Labels) -> BoolArray:
        """Which of these complete plans have an end, of all that they may have, with which they are good enough.

        Between two of `bounds.ends_s` a plan ends no earlier than at the first, and pays no less than at the second.
        """
        tail, network = labels.tail, self.bounds.window.network
        repeats, local_s = network.repeats, self.bounds.local_lane_s(labels, network.start)
        end_s = np.maximum(self.bounds.ends_s[:-1], tail.finish_s[:, None]) + local_s[:, None]
        iteration_s = ended_s(tail.forward_s[:, None], tail.forward_lane_s[:, None], end_s, repeats)
        price_usd_s = tail.price_usd_s[:, None] + self.incumbents.time_value_usd_s
        usd: Array = dollars(price_usd_s, iteration_s, tail.request_usd[:, None] + labels.in_time_usd[:, 1:])
        good = usd < self.incumbents.threshold_usd(iteration_s)
        return np.asarray(good.any(axis=1))
