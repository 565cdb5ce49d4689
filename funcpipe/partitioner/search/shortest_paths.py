"""Least sums along the paths of a network, for many weights and many caps on the lanes at once.

An iteration takes sums over its stages (`finish_weights`) plus `repeats` times the slowest forward lane. If no lane may
be slower than a cap, the slowest lane is known well enough, and what is left is a sum, which a shortest path minimises.
This is done for a series of caps, each of which excludes the options whose lanes are slower. What a cap leaves has a
slowest lane between the cap below and itself; counted is the least lane there is in between, so the result is a lower
bound, and an exact one where each lane has a cap of its own.

By hand: options with lanes of 1, 2 and 4 s, and two caps. The caps are 1 and 4 s, the least lanes counted 1 and 2 s. A
path of the first option alone counts 1 s under the first cap, exactly; a path with a lane of 4 s counts 2 s.

Arrays of results have the shape [nodes, weights, caps].
"""

from dataclasses import dataclass

import numpy as np

from funcpipe.partitioner.cost import Array, IntArray
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
