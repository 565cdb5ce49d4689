"""A first look at a network: the range of seconds, what a second costs at least, and good plans to begin with.

Shortest paths are computed for seconds alone, for price alone, and for price + slope · seconds with ten slopes from
flat to steep. For every path P with T seconds, price + slope · T is at least `height`, the least sum for this slope; so
a plan of at most T seconds costs at least `height − slope · T` dollars a second. The paths themselves are real plans
from all over the trade-off between time and money, and the best of them are the first incumbents.

By hand: two plans, 10 s at 1 $/s and 4 s at 3 $/s. For slope 0.5 the heights are 1 + 5 = 6 and 3 + 2 = 5; the least is
5. A plan that takes at most 6 s costs at least 5 − 0.5 · 6 = 2 $/s: the first plan is out, the second fits the bound.
"""

from dataclasses import dataclass

import numpy as np

from funcpipe.core import ScheduleKind
from funcpipe.partitioner.cost.arrays import Array, IntArray
from funcpipe.partitioner.cost.pipeline import ended_s
from funcpipe.partitioner.search.option_network import OptionNetwork
from funcpipe.partitioner.search.shortest_paths import lane_caps, shortest_paths, to_end

_CAPS = 16
_SLOPES = 10
_SHORTEST_S = 1e-9
"""Seconds that an iteration is taken to need at least, so that windows of time have a beginning above 0."""

_SECONDS, _PRICE = range(2)
"""The columns of the first pair of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialBounds:
    """Iterations take from `fastest_s` to `slowest_s` seconds; for each slope, price + slope · seconds >= height.

    `paths` are those that were found on the way: a column of options for each.
    """

    fastest_s: float
    slowest_s: float
    least_price_usd_s: float
    slopes: Array
    heights: Array
    paths: IntArray

    def price_usd_s(self, iteration_s: Array) -> Array:
        """What functions cost at least for each second of an iteration that takes no longer than `iteration_s`."""
        of_slopes: Array = (self.heights - iteration_s[:, None] * self.slopes).max(axis=1)
        return np.maximum(self.least_price_usd_s, of_slopes)


def initial_bounds(network: OptionNetwork) -> InitialBounds | None:
    """The first look; None where no path leads from the start to the end."""
    caps = lane_caps(network, _CAPS)
    seconds, price = network.closed_s, network.costs.price_usd_s
    ends = np.stack([seconds, price], axis=1)
    least = to_end(network, ends, caps.excluded)
    lanes_s = network.repeats * caps.least_lane_s
    fastest_s = float((least[network.start, _SECONDS] + lanes_s).min())
    if not np.isfinite(fastest_s):
        return None
    fastest_s = max(fastest_s, network.setting.loading_s, _SHORTEST_S)
    slowest_s = max(_slowest_s(network), fastest_s)
    slope = max(float(price.mean()), 1e-12) / slowest_s
    slopes = np.geomspace(slope / 4, slope * 4 * (slowest_s / fastest_s) ** 2, _SLOPES)
    weights = price[:, None] + slopes * seconds[:, None]
    sums = to_end(network, weights, caps.excluded)
    paths = [shortest_paths(network, w, caps.excluded, found) for w, found in ((ends, least), (weights, sums))]
    return InitialBounds(
        fastest_s=fastest_s,
        slowest_s=slowest_s,
        least_price_usd_s=float(least[network.start, _PRICE].min()),
        slopes=slopes,
        heights=(sums[network.start] + slopes[:, None] * lanes_s).min(axis=1),
        paths=_side_by_side(paths),
    )


def _slowest_s(network: OptionNetwork) -> float:
    """An upper bound: the longest way through all lanes, with the slowest lane and synchronisation of any option."""
    costs, setting = network.costs, network.setting
    most_s = _longest(network, network.pass_s)
    lanes_s = costs.forward_lane_s.max() + costs.backward_lane_s.max()
    if setting.schedule is not ScheduleKind.GPIPE:
        lanes_s = max(lanes_s, most_s)  # no stage waits for longer than a micro-batch takes there and back
    pipeline_s = ended_s(most_s, lanes_s, costs.sync_s.max(), network.repeats)
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
