"""When an iteration ends, as a sum over the stages of a plan: a weighted mean of the stages' ends.

An iteration ends when the last stage has synchronised: a maximum over stages, which no shortest path can minimise. But
any weighted mean of the stages' ends is a lower bound of it. If the weights belong to *layers*, and a stage has those
of its layers, the mean is a sum over the path whatever the cuts: the backward of a stage counts in the ends of itself
and of the stages before it, and its synchronisation in its own end. For each option, with weights that sum up to 1,

    waiting = weights of the layers up to its last     (ends that wait for its backward)
    own     = weights of its layers
    closing = waiting · backward + own · (repeats · slowest backward lane + synchronisation)

By hand: stages of one layer each with backwards of 2 and 4 s, synchronisations of 1 and 3 s, one micro-batch. They end
2 + 4 + 1 = 7 s and 4 + 3 = 7 s after the forward. Weights of ½ each say ½ · 2 + ½ · 1 = 1.5 s for the first stage and
1 · 4 + ½ · 3 = 5.5 s for the second: 7 s. With all weight on the first layer, nothing would be said of how long the
second stage synchronises.

The best weights are Lagrange multipliers of the maximum: the stages that have weight end together. `improved` moves
weight to the layers of the stage that ends last on the path that the present weights say is best.
"""

import numpy as np

from funcpipe.partitioner.cost import Array, IntArray
from funcpipe.partitioner.cost.pipeline import synchronised_s
from funcpipe.partitioner.search.option_network import OptionNetwork

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
        network.repeats,
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
