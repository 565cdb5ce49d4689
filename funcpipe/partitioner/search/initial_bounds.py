"""Least sums along paths, and what they say of a space: its range of seconds, the price of a second, and good plans.

An iteration takes all forwards, `repeats` times the slowest forward lane, and then as long as the stage that ends last.
Two maxima, which no shortest path can minimise, are made sums.

*Caps.* If no lane may be slower than a cap, the slowest lane is known well enough. This is done for a series of caps,
each of which excludes the options whose lanes are slower. What a cap leaves has a slowest lane between the cap below
and itself; counted is the least lane there is in between, so the result is a lower bound, and an exact one where each
lane has a cap of its own. By hand: options with lanes of 1, 2 and 4 s, and two caps. The caps are 1 and 4 s, the least
lanes counted 1 and 2 s. A path of the first option alone counts 1 s under the first cap, exactly; a path with a lane of
4 s counts 2 s.

*Weights.* Any weighted mean of the stages' ends is a lower bound of the last one. If the weights belong to *layers*,
and a stage has those of its layers, the mean is a sum over the path whatever the cuts: the backward of a stage counts
in the ends of itself and of the stages before it, and its synchronisation in its own end. For each option, with weights
that sum up to 1,

    waiting = weights of the layers up to its last     (ends that wait for its backward)
    own     = weights of its layers
    closing = waiting · backward + own · (repeats · slowest backward lane + synchronisation)

By hand: stages of one layer each with backwards of 2 and 4 s, synchronisations of 1 and 3 s, one micro-batch. They end
2 + 4 + 1 = 7 s and 4 + 3 = 7 s after the forward. Weights of ½ each say ½ · 2 + ½ · 1 = 1.5 s for the first stage and
1 · 4 + ½ · 3 = 5.5 s for the second: 7 s. With all weight on the first layer, nothing would be said of how long the
second stage synchronises. The best weights are Lagrange multipliers of the maximum: the stages that have weight end
together. `improved` moves weight to the layers of the stage that ends last on the path that the present weights say is
best.

*The first look.* Shortest paths are computed for seconds alone, for price alone, and for price + slope · seconds with
eight slopes from flat to steep. For every path with T seconds, price + slope · T is at least `height`, the least sum
for this slope; so a plan of at most T seconds costs at least `height − slope · T` dollars a second. The paths
themselves are real plans from all over the trade-off between time and money, and the best of them are the first
incumbents. By hand: two plans, 10 s at 1 $/s and 4 s at 3 $/s. For slope 0.5 the heights are 1 + 5 = 6 and 3 + 2 = 5;
the least is 5. A plan that takes at most 6 s costs at least 5 − 0.5 · 6 = 2 $/s: the first plan is out, the second fits
the bound.
"""

from dataclasses import dataclass

import numpy as np

from funcpipe.core import ScheduleKind
from funcpipe.partitioner.cost import Array, IntArray
from funcpipe.partitioner.cost.pipeline import ended_s, synchronised_s
from funcpipe.partitioner.search.option_network import OptionNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneCaps:
    """Caps on an option's slowest lanes in ascending order; the last one admits every option.

    `least_lane_s[g]` is the least lane above cap g − 1. `excluded[o, g]` is infinite where the lanes of option o exceed
    cap g, else 0; `first[o]` is the first cap that admits option o.
    """

    caps_s: Array
    least_lane_s: Array
    excluded: Array
    first: IntArray


def lane_caps(network: OptionNetwork, count: int) -> LaneCaps:
    """At most `count` caps among the forward lanes of `network`; one where no micro-batch follows the first."""
    lane_s = network.costs.forward_lane_s
    values = np.unique(lane_s) if network.repeats else lane_s.max(keepdims=True)
    picked = np.unique(np.linspace(-1, len(values) - 1, min(count, len(values)) + 1).round().astype(np.int64)[1:])
    caps_s = values[picked]
    least_lane_s = values[np.concatenate([[0], picked[:-1] + 1])]
    return LaneCaps(
        caps_s=caps_s,
        least_lane_s=least_lane_s if network.repeats else np.zeros(1),
        excluded=np.where(lane_s[:, None] > caps_s, np.inf, 0.0),
        first=np.searchsorted(caps_s, lane_s),
    )


def to_end(network: OptionNetwork, weights: Array, excluded: Array) -> Array:
    """Element [n, w, g]: the least sum of `weights[:, w]` on a path from node n to the end, under cap g."""
    least = np.full((network.start + 1, weights.shape[1], excluded.shape[1]), np.inf)
    least[0] = 0.0
    after = network.options.after
    for node in range(1, network.start + 1):
        low, high = network.leaving[node], network.leaving[node + 1]
        if low < high:
            sums = least[after[low:high]]
            sums += weights[low:high, :, None]
            sums += excluded[low:high, None, :]
            sums.min(axis=0, out=least[node])
    return least


def from_start(network: OptionNetwork, weights: Array, excluded: Array) -> Array:
    """Element [n, w, g]: the least sum of `weights[:, w]` on a path from the start to node n, under cap g."""
    least = np.full((network.start + 1, weights.shape[1], excluded.shape[1]), np.inf)
    least[network.start] = 0.0
    before = network.options.before[network.by_after]
    weights, excluded = weights[network.by_after], excluded[network.by_after]
    for node in range(network.start - 1, -1, -1):
        low, high = network.entering[node], network.entering[node + 1]
        if low < high:
            sums = least[before[low:high]]
            sums += weights[low:high, :, None]
            sums += excluded[low:high, None, :]
            sums.min(axis=0, out=least[node])
    return least


def shortest_paths(network: OptionNetwork, weights: Array, excluded: Array, least: Array) -> IntArray:
    """The paths behind `least` = to_end(...) from the start, each once: a column of options for each, then −1."""
    columns = np.flatnonzero(np.isfinite(least[network.start].ravel()))
    weight, cap = np.unravel_index(columns, least.shape[1:])
    node = np.full(len(columns), network.start)
    steps = []
    while (node > 0).any():
        option = _best_options(network, weights, excluded, least, node, weight, cap)
        steps.append(option)
        node = np.where(option >= 0, network.options.after[option], 0)
    if not steps:
        return np.empty((0, 0), dtype=np.int64)
    return np.unique(np.stack(steps), axis=1)


def shortest_path(network: OptionNetwork, weights: Array, excluded: Array, least: Array) -> IntArray:
    """The path behind `least`, one column of to_end(...), for one column of `weights` and of `excluded`."""
    node, path = network.start, []
    while node > 0:
        low, high = network.leaving[node], network.leaving[node + 1]
        option = low + int((least[network.options.after[low:high]] + weights[low:high] + excluded[low:high]).argmin())
        path.append(option)
        node = int(network.options.after[option])
    return np.array(path, dtype=np.int64)


def _best_options(
    network: OptionNetwork,
    weights: Array,
    excluded: Array,
    least: Array,
    node: IntArray,
    weight: IntArray,
    cap: IntArray,
) -> IntArray:
    """For each column the option that the shortest path takes at its node; −1 at the end."""
    option = np.full(len(node), -1)
    for here in np.unique(node[node > 0]):
        which = np.flatnonzero(node == here)
        low, high = network.leaving[here], network.leaving[here + 1]
        sums = least[network.options.after[low:high]][:, weight[which], cap[which]]
        sums += weights[low:high][:, weight[which]]
        sums += excluded[low:high][:, cap[which]]
        option[which] = low + sums.argmin(axis=0)
    return option


_STEP = 0.6
_LEAST = 1e-6
"""How far the weights move, as an exponent, and the least weight that a layer keeps, so that it can grow again."""


def first_weights(network: OptionNetwork) -> Array:
    """Weights to begin with: half of them evenly over layers, half by how long layers at least take to synchronise."""
    options = network.options
    layers = int(options.stop.max())
    one_layer = options.stop - options.first == 1
    sync_s = np.zeros(layers)
    np.maximum.at(sync_s, options.first[one_layer], options.costs.sync_s[one_layer])
    even = np.full(layers, 1 / layers)
    return (even + sync_s / sync_s.sum()) / 2 if sync_s.any() else even


def waiting_and_own(network: OptionNetwork, weights: Array) -> tuple[Array, Array]:
    """For each option the weights of the ends that wait for its backward, and of its own end."""
    upto = np.concatenate([[0.0], weights.cumsum()])
    waiting = upto[network.options.stop]
    return waiting, waiting - upto[network.options.first]


def in_front(network: OptionNetwork, weights: Array) -> Array:
    """For each node the weights of all layers in front of it; nodes that no option leaves have none."""
    upto = np.concatenate([[0.0], weights.cumsum()])
    nodes = np.zeros(network.start + 1)
    nodes[network.options.before] = upto[network.options.first]
    return nodes


def closing_s(network: OptionNetwork, weights: Array) -> Array:
    """Each option's part of the weighted mean of the stages' ends."""
    waiting, own = waiting_and_own(network, weights)
    costs = network.costs
    lane_s = network.repeats * costs.backward_lane_s
    found: Array = waiting * costs.backward_sum_s + own * (lane_s + costs.sync_s)
    return found


def improved(network: OptionNetwork, weights: Array, path: IntArray, step: float = _STEP) -> Array:
    """`weights` with more on the layers of those stages of a path that end late."""
    options, costs = network.options, network.costs
    chosen = path[::-1]
    ends_s = synchronised_s(
        costs.backward_sum_s[chosen].cumsum(),
        np.maximum.accumulate(costs.backward_lane_s[chosen]),
        costs.sync_s[chosen],
        network.meeting_repeats,
    )
    spread_s = float(np.ptp(ends_s))
    if spread_s <= 0:
        return weights
    early = np.zeros(len(weights))
    for option, end_s in zip(chosen, ends_s, strict=True):
        early[options.first[option] : options.stop[option]] = (ends_s.max() - end_s) / spread_s
    moved = weights * np.exp(-step * early) + _LEAST
    found: Array = moved / moved.sum()
    return found


def closing_usd(network: OptionNetwork, weights: Array, second_usd: float) -> Array:
    """The same at a price for each second, and with the dollars for requests beyond those of way `fewest`."""
    waiting, own = waiting_and_own(network, weights)
    costs = network.costs
    lane_s = network.repeats * costs.backward_lane_s
    moving_usd: Array = second_usd * (waiting * costs.backward_sum_s + own * lane_s)
    return moving_usd + network.sync_usd(second_usd * own)


_FIRST_CAPS = 16
_SLOPES = 8
_FIRST_IMPROVEMENTS = 2
"""How often the weights of the stages' ends are improved, for each of two slopes."""
_SHORTEST_S = 1e-9
"""Seconds that an iteration is taken to need at least, so that windows of time have a beginning above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialBounds:
    """Iterations take from `fastest_s` to `slowest_s` seconds; for each slope, price + slope · seconds >= height.

    `paths` are those that were found on the way: a column of options for each. `weights` are those of `improved`
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
        """The least dollars of functions for each second of an iteration that takes no longer than `iteration_s`."""
        of_slopes: Array = (self.heights - iteration_s[:, None] * self.slopes).max(axis=1)
        return np.maximum(self.least_price_usd_s, of_slopes)


def initial_bounds(network: OptionNetwork) -> InitialBounds | None:
    """The initial bounds; None where no path leads from the start to the end."""
    if not len(network):
        return None
    caps = lane_caps(network, _FIRST_CAPS)
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
        for _ in range(_FIRST_IMPROVEMENTS):
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
