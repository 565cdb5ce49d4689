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

from funcpipe.partitioner.cost.arrays import Array
from funcpipe.partitioner.cost.pipeline import dollars, ended_s
from funcpipe.partitioner.search.labels import Labels
from funcpipe.partitioner.search.option_network import OptionNetwork
from funcpipe.partitioner.search.shortest_paths import from_start, lane_caps
from funcpipe.partitioner.search.time_window import TimeWindow

_CAPS = 48


class _Ahead(IntEnum):
    """What is summed up along paths from the start: the columns of their weights."""

    TIMED_USD = 0
    FORWARD_USD = 1
    UNTIMED_USD = 2
    WORKED_USD = 3
    CLOSING_S = 4
    CLOSED_S = 5
    FORWARD_S = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionBounds:
    """The least that lies before each node; arrays with an element for each node.

    `timed_usd[n, g]` holds dollars if no lane before node n exceeds cap g; `later_timed_usd[n, g]` the least of cap g
    and all higher ones, with the dollars of the slowest lane. The fields in seconds are the least sum, or the least
    slowest lane, of any path from the start to the node; `next_backward_lane_s` and `next_share` are of the stage right
    before the node alone.
    """

    window: TimeWindow
    least_lane_s: Array
    timed_usd: Array
    later_timed_usd: Array
    forward_usd: Array
    untimed_usd: Array
    worked_usd: Array
    closing_s: Array
    closed_s: Array
    forward_s: Array
    lanes_s: Array
    forward_lane_s: Array
    backward_lane_s: Array
    next_backward_lane_s: Array
    next_share: Array

    def earliest_s(self, labels: Labels, node: int) -> Array:
        """The least seconds of an iteration of any completion."""
        repeats, tail = self.window.network.repeats, labels.tail
        lane_s = np.maximum(tail.forward_lane_s + tail.backward_lane_s, self.lanes_s[node])
        timed_s = ended_s(tail.forward_s + tail.backward_s, lane_s, self.closed_s[node], repeats)
        forward_lane_s = np.maximum(tail.forward_lane_s, self.forward_lane_s[node])
        finished_s = ended_s(tail.forward_s + self.forward_s[node], forward_lane_s, tail.finish_s, repeats)
        result: Array = np.maximum(timed_s, finished_s)
        return result

    def cheapest_usd(self, labels: Labels, node: int) -> Array:
        """The least dollars of any completion that lies in the window, value of time included."""
        window, tail, repeats = self.window, labels.tail, self.window.network.repeats
        second_usd = window.second_usd
        paid = dollars(tail.price_usd_s, window.low_s, tail.request_usd) + window.offset_usd
        lane_s = tail.forward_lane_s + tail.backward_lane_s
        cap = np.searchsorted(self.least_lane_s, lane_s, side="right")
        # the slowest lane is the label's own under the caps up to it, and one before the node under higher caps
        own_lane = self.timed_usd[node][np.maximum(cap - 1, 0)] + second_usd * repeats * lane_s
        lanes = np.minimum(np.where(cap > 0, own_lane, np.inf), self.later_timed_usd[node][cap])
        timed = second_usd * (tail.forward_s + tail.backward_s) + lanes
        finished = second_usd * ended_s(tail.forward_s, tail.forward_lane_s, tail.finish_s, repeats)
        finished += self.forward_usd[node]
        untimed = self.untimed_usd[node] + second_usd * window.low_s
        worked = self.worked_usd[node] + window.work_usd_s * tail.work_s
        result: Array = paid + np.maximum(np.maximum(timed, finished), np.maximum(untimed, worked))
        return result


def completion_bounds(window: TimeWindow) -> CompletionBounds:
    """The least that lies before each node of the window's network."""
    network, costs, second_usd = window.network, window.network.costs, window.second_usd
    caps = lane_caps(network, _CAPS)
    priced_usd, closed_s = window.priced_usd, network.closed_s
    columns = {
        _Ahead.TIMED_USD: priced_usd + second_usd * closed_s,
        _Ahead.FORWARD_USD: priced_usd + second_usd * costs.forward_sum_s,
        _Ahead.UNTIMED_USD: priced_usd,
        _Ahead.WORKED_USD: priced_usd + window.work_usd_s * costs.work_s,
        _Ahead.CLOSING_S: network.closing_s,
        _Ahead.CLOSED_S: closed_s,
        _Ahead.FORWARD_S: costs.forward_sum_s,
    }
    ahead = from_start(network, np.stack([columns[name] for name in _Ahead], axis=1), caps.excluded)
    timed_usd, any_lane = ahead[:, _Ahead.TIMED_USD], ahead[:, :, -1]
    with_lanes = timed_usd + second_usd * network.repeats * caps.least_lane_s
    later = np.minimum.accumulate(with_lanes[:, ::-1], axis=1)[:, ::-1]
    return CompletionBounds(
        window=window,
        least_lane_s=caps.least_lane_s,
        timed_usd=timed_usd,
        later_timed_usd=np.concatenate([later, np.full((len(later), 1), np.inf)], axis=1),
        forward_usd=any_lane[:, _Ahead.FORWARD_USD],
        untimed_usd=any_lane[:, _Ahead.UNTIMED_USD],
        worked_usd=any_lane[:, _Ahead.WORKED_USD],
        closing_s=any_lane[:, _Ahead.CLOSING_S],
        closed_s=any_lane[:, _Ahead.CLOSED_S],
        forward_s=any_lane[:, _Ahead.FORWARD_S],
        lanes_s=_least_peak(network, network.lane_s),
        forward_lane_s=_least_peak(network, costs.forward_lane_s),
        backward_lane_s=_least_peak(network, costs.backward_lane_s),
        next_backward_lane_s=_least_entering(network, costs.backward_lane_s),
        next_share=_least_entering(network, costs.share),
    )


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
