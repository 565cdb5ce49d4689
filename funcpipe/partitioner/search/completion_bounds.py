"""What labels are and what lies before them: the least that any completion of a partial plan takes."""

from dataclasses import dataclass, fields

import numpy as np

from funcpipe.partitioner.cost.formulas import Array
from funcpipe.partitioner.problem.options import BoolArray
from funcpipe.partitioner.problem.stage_graph import IntArray
from funcpipe.partitioner.search.option_network import OptionNetwork
from funcpipe.partitioner.search.shortest_paths import from_start, ladder
from funcpipe.partitioner.search.time_window import TimeWindow

_RUNGS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Partial plans of one node; an element each. `finish_s` is when the last of their stages has synchronised, counted
    from the first backward; `parent` the label behind `option` at the node that it leads to.
    """

    forward_s: Array
    forward_lane_s: Array
    backward_s: Array
    backward_lane_s: Array
    finish_s: Array
    price_usd_s: Array
    request_usd: Array
    work_s: Array
    option: IntArray
    parent: IntArray

    def take(self, which: IntArray | BoolArray) -> "Labels":
        """Those labels alone, in that order."""
        return Labels(**{item.name: getattr(self, item.name)[which] for item in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionBounds:
    """What lies before each node, at least: the sums and the slowest lanes of any completion.

    `whole_usd[n, g]` holds dollars under cap g of the lanes, above which no lane before the node lies;
    `later_usd[n, g]` those of this and all higher caps with the lanes' own dollars, the least of them.
    `next_backward_lane_s` is of the stage right before the node alone, and `next_share` its share.
    """

    window: TimeWindow
    lows_s: Array
    whole_usd: Array
    later_usd: Array
    forward_usd: Array
    untimed_usd: Array
    work_usd: Array
    lanes_s: Array
    closing_s: Array
    rest_s: Array
    forward_s: Array
    forward_lane_s: Array
    backward_lane_s: Array
    next_backward_lane_s: Array
    next_share: Array

    def earliest_s(self, labels: Labels, node: int) -> Array:
        """The least seconds of an iteration of any completion."""
        repeats = self.window.field.repeats
        lane_s = np.maximum(labels.forward_lane_s + labels.backward_lane_s, self.lanes_s[node])
        whole_s = labels.forward_s + labels.backward_s + self.rest_s[node] + repeats * lane_s
        forward_lane_s = np.maximum(labels.forward_lane_s, self.forward_lane_s[node])
        finished_s = labels.forward_s + self.forward_s[node] + repeats * forward_lane_s + labels.finish_s
        result: Array = np.maximum(whole_s, finished_s)
        return result

    def cheapest_usd(self, labels: Labels, node: int) -> Array:
        """The least dollars of any completion that lies in the window, value of time included."""
        window, repeats = self.window, self.window.field.repeats
        second_usd = window.second_usd
        paid = window.low_s * labels.price_usd_s + labels.request_usd + window.offset_usd
        lane_s = labels.forward_lane_s + labels.backward_lane_s
        rung = np.searchsorted(self.lows_s, lane_s, side="right")
        at_rung = self.whole_usd[node][np.maximum(rung - 1, 0)] + second_usd * repeats * lane_s
        lanes = np.minimum(np.where(rung > 0, at_rung, np.inf), self.later_usd[node][rung])
        whole = second_usd * (labels.forward_s + labels.backward_s) + lanes
        finished_s = labels.forward_s + repeats * labels.forward_lane_s + labels.finish_s
        finished = self.forward_usd[node] + second_usd * finished_s
        untimed = self.untimed_usd[node] + second_usd * window.low_s
        worked = self.work_usd[node] + _work_usd_s(window) * labels.work_s
        result: Array = paid + np.maximum(np.maximum(whole, finished), np.maximum(untimed, worked))
        return result


def _work_usd_s(window: TimeWindow) -> float:
    cores = window.field.setting.spec.shared_cores
    return 0.0 if cores is None else window.second_usd / cores


def completion_bounds(window: TimeWindow) -> CompletionBounds:
    """What lies before each node of the window's field."""
    field, options, second_usd = window.field, window.field.options, window.second_usd
    rungs = ladder(field, _RUNGS)
    priced_usd, whole_s = window.priced_usd, options.forward_sum_s + field.closing_s
    dollars = [
        second_usd * whole_s,
        second_usd * options.forward_sum_s,
        0 * whole_s,
        _work_usd_s(window) * options.work_s,
    ]
    seconds = [field.closing_s, whole_s, options.forward_sum_s]
    weights = np.stack([*(priced_usd + more for more in dollars), *seconds], axis=1)
    ahead = from_start(field, weights, rungs.barred)
    with_lanes = ahead[:, 0] + second_usd * field.repeats * rungs.lows_s
    later = np.minimum.accumulate(with_lanes[:, ::-1], axis=1)[:, ::-1]
    return CompletionBounds(
        window=window,
        lows_s=rungs.lows_s,
        whole_usd=ahead[:, 0],
        later_usd=np.concatenate([later, np.full((len(later), 1), np.inf)], axis=1),
        forward_usd=ahead[:, 1, -1],
        untimed_usd=ahead[:, 2, -1],
        work_usd=ahead[:, 3, -1],
        closing_s=ahead[:, 4, -1],
        rest_s=ahead[:, 5, -1],
        forward_s=ahead[:, 6, -1],
        lanes_s=_least_peak(field, field.lane_s),
        forward_lane_s=_least_peak(field, options.forward_lane_s),
        backward_lane_s=_least_peak(field, options.backward_lane_s),
        next_backward_lane_s=_least_entering(field, options.backward_lane_s),
        next_share=_least_entering(field, options.share),
    )


def _least_entering(field: OptionNetwork, values: Array) -> Array:
    """For each node the least value of an option that leads to it; 0 where there is none."""
    least = np.full(field.start + 1, np.inf)
    np.minimum.at(least, field.options.after, values)
    return np.where(np.isfinite(least), least, 0.0)


def _least_peak(field: OptionNetwork, peak: Array) -> Array:
    """For each node the least that the greatest `peak` on a path from the start to it can be; 0 where there is none."""
    least = np.full(field.start + 1, np.inf)
    least[field.start] = 0.0
    for node in range(field.start - 1, -1, -1):
        entering = field.by_after[field.entering[node] : field.entering[node + 1]]
        if len(entering):
            least[node] = np.maximum(least[field.options.before[entering]], peak[entering]).min()
    return np.where(np.isfinite(least), least, 0.0)
