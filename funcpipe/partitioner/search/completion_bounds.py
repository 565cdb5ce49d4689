"""What any completion of a partial plan takes at least: everything that may lie in front of a node.

For each node, shortest paths from the start give the least dollars, seconds and slowest lanes of what comes before it.
Together with a label at the node they bound every plan that the label can become, from below. As in `time_window`, the
seconds are bounded in four ways, each with its own least dollars: *timed* (all lanes, with the caps on the slowest),
*finished* (the label's own synchronisation, then only forwards lie before it), *untimed* (`low_s`), *worked*.

By hand, in seconds alone: before a node lie at least 5 s of lanes, with a slowest lane of at least 1 s, and two
micro-batches follow the first. A label of 4 s in all whose slowest lanes take 2 s becomes a plan of at least
5 + 4 + 2 · 2 = 13 s.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from funcpipe.partitioner.cost import Array
from funcpipe.partitioner.cost.pipeline import dollars, ended_s, synchronised_s
from funcpipe.partitioner.search.finish_weights import closing_s, closing_usd, in_front
from funcpipe.partitioner.search.labels import Labels
from funcpipe.partitioner.search.option_network import OptionNetwork
from funcpipe.partitioner.search.shortest_paths import from_start, lane_caps
from funcpipe.partitioner.search.time_window import TimeWindow

_CAPS = 48
_ENDS = 32
"""For how many ends labels know their cheapest ways of synchronising."""

_SCALES = (0.0, 0.5, 1.0, 2.0, 4.0)
"""What the weights of the ends before a node are multiplied by; what is left to 1 is the weight of the label's end."""


class _Ahead(IntEnum):
    """What is summed up along paths from the start: the columns of their weights, after those of `_SCALES`."""

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
    closing_usd: Array
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
        end_s = self.timed_s[node] + _mean_end_s(labels, float(self.in_front[node]))
        timed_s = ended_s(tail.forward_s, forward_lane_s, end_s, repeats)
        finished_s = ended_s(tail.forward_s + self.forward_s[node], forward_lane_s, tail.finish_s, repeats)
        result: Array = np.maximum(timed_s, finished_s)
        return result

    def closed_s(self, labels: Labels, node: int) -> Array:
        """When the stages before the node have synchronised at the earliest, counted like `finish_s`."""
        slowest_s = np.maximum(labels.tail.backward_lane_s, self.backward_lane_s[node])
        found: Array = synchronised_s(
            labels.tail.backward_s, slowest_s, self.closing_s[node], self.window.network.repeats
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
                most = np.maximum(most, second_usd * _mean_end_s(labels, share) + lanes)
                if scale == 1.0:
                    most = np.maximum(most, labels.mean_usd + lanes)
        found: Array = most + second_usd * tail.forward_s
        return found


def _mean_end_s(labels: Labels, share: float) -> Array:
    """The label's part of the weighted mean of all ends, of which a share lies before it and waits for its backward."""
    found: Array = share * labels.tail.backward_s + (1 - share) * labels.tail.finish_s
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
    first_s = any_lane[0, _Ahead.CLOSING_S] + network.repeats * backward_lane_s[0]
    forward_s = any_lane[0, _Ahead.FORWARD_S] + network.repeats * caps.least_lane_s[0]
    return CompletionBounds(
        window=window,
        ends_s=_ends_s(first_s, window.high_s - forward_s, network.options.ways.columns),
        in_front=in_front(network, weights),
        closing_usd=closing_usd(network, weights, second_usd),
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
