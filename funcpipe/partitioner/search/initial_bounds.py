"""A first look at a network: the range of seconds, what a second costs at least, and good plans to begin with.

Shortest paths are computed for seconds alone, for price alone, and for price + slope · seconds with eight slopes from
flat to steep. For every path P with T seconds, price + slope · T is at least `height`, the least sum for this slope; so
a plan of at most T seconds costs at least `height − slope · T` dollars a second. The paths themselves are real plans
from all over the trade-off between time and money, and the best of them are the first incumbents.

By hand: two plans, 10 s at 1 $/s and 4 s at 3 $/s. For slope 0.5 the heights are 1 + 5 = 6 and 3 + 2 = 5; the least is
5. A plan that takes at most 6 s costs at least 5 − 0.5 · 6 = 2 $/s: the first plan is out, the second fits the bound.
"""

from dataclasses import dataclass

import numpy as np

from funcpipe.core import ScheduleKind
from funcpipe.partitioner.cost import Array, IntArray
from funcpipe.partitioner.cost.pipeline import ended_s
from funcpipe.partitioner.search.finish_weights import closing_s, first_weights, improved
from funcpipe.partitioner.search.option_network import OptionNetwork
from funcpipe.partitioner.search.shortest_paths import lane_caps, shortest_path, shortest_paths, to_end

_CAPS = 16
_SLOPES = 8
_IMPROVEMENTS = 2
"""How often the weights of the stages' ends are improved, for each of two slopes."""
_SHORTEST_S = 1e-9
"""Seconds that an iteration is taken to need at least, so that windows of time have a beginning above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialBounds:
    """Iterations take from `fastest_s` to `slowest_s` seconds; for each slope, price + slope · seconds >= height.

    `paths` are those that were found on the way: a column of options for each. `weights` are those of `finish_weights`
    with which the bounds are good.
    """

    fastest_s: float
    slowest_s: float
    least_price_usd_s: float
    slopes: Array
    heights: Array
    paths: IntArray
    weights: Array

    def price_usd_s(self, iteration_s: Array) -> Array:
        """What functions cost at least for each second of an iteration that takes no longer than `iteration_s`."""
        of_slopes: Array = (self.heights - iteration_s[:, None] * self.slopes).max(axis=1)
        return np.maximum(self.least_price_usd_s, of_slopes)


def initial_bounds(network: OptionNetwork) -> InitialBounds | None:
    """The first look; None where no path leads from the start to the end."""
    if not len(network):
        return None
    caps = lane_caps(network, _CAPS)
    price, forward_s = network.costs.price_usd_s, network.costs.forward_sum_s
    weights = first_weights(network)
    ends = np.stack([forward_s + closing_s(network, weights), network.closed_s, price], axis=1)
    least = to_end(network, ends, caps.excluded)
    lanes_s = network.repeats * caps.least_lane_s
    shortest = least[network.start]
    fastest_s = float((shortest[:2] + lanes_s).min(axis=1).max())
    if not np.isfinite(fastest_s):
        return None
    fastest_s = max(fastest_s, network.setting.loading_s, _SHORTEST_S)
    slowest_s = max(_slowest_s(network), fastest_s)
    slope = max(float(price.mean()), 1e-12) / slowest_s
    slopes = np.geomspace(slope / 4, slope * 4 * (slowest_s / fastest_s) ** 2, _SLOPES)
    lines: list[tuple[float, float]] = []
    for chosen in slopes[_SLOPES // 2 :: 2]:
        for _ in range(_IMPROVEMENTS):
            column = price + chosen * (forward_s + closing_s(network, weights))
            sums = to_end(network, column[:, None], caps.excluded)
            whole = sums[network.start, 0] + chosen * lanes_s
            cap = int(whole.argmin())
            lines.append((float(chosen), float(whole[cap])))
            path = shortest_path(network, column, caps.excluded[:, cap], sums[:, 0, cap])
            weights = improved(network, weights, path)
    seconds = np.stack([forward_s + closing_s(network, weights), network.closed_s], axis=1)
    columns = (price[:, None, None] + slopes * seconds[:, :, None]).reshape(len(network), -1)
    sums = to_end(network, columns, caps.excluded)
    heights = (sums[network.start] + np.tile(slopes, 2)[:, None] * lanes_s).min(axis=1)
    paths = [shortest_paths(network, w, caps.excluded, found) for w, found in ((ends, least), (columns, sums))]
    return InitialBounds(
        fastest_s=fastest_s,
        slowest_s=slowest_s,
        least_price_usd_s=float(shortest[-1].min()),
        slopes=np.concatenate([slopes, slopes, [line[0] for line in lines]]),
        heights=np.concatenate([heights, [line[1] for line in lines]]),
        paths=_side_by_side(paths),
        weights=weights,
    )


def _slowest_s(network: OptionNetwork) -> float:
    """An upper bound: the longest way through all lanes, with the slowest lane and synchronisation of any option."""
    costs, setting = network.costs, network.setting
    slowest_sync_s = network.options.ways.seconds[network.options.row, 0].max()
    most_s = _longest(network, network.pass_s)
    lanes_s = costs.forward_lane_s.max() + costs.backward_lane_s.max()
    if setting.schedule is not ScheduleKind.GPIPE:
        lanes_s = max(lanes_s, most_s)  # no stage waits for longer than a micro-batch takes there and back
    pipeline_s = ended_s(most_s, lanes_s, slowest_sync_s, network.repeats)
    if not setting.seconds_per_work:
        return float(pipeline_s)
    return float(max(pipeline_s, setting.seconds_per_work * _longest(network, costs.work_s)))


def _longest(network: OptionNetwork, seconds: Array) -> float:
    """The largest sum of `seconds` on a path from the start to the end."""
    return -float(to_end(network, -seconds[:, None], np.zeros((len(network), 1)))[network.start, 0, 0])


def _side_by_side(paths: list[IntArray]) -> IntArray:
    """The columns of all, filled up with −1."""
    longest = max(len(some) for some in paths)
    return np.concatenate(
        [np.pad(some, ((0, longest - len(some)), (0, 0)), constant_values=-1) for some in paths], axis=1
    )
