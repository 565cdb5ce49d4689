"""The search inside a window: partial plans from the model's end to its start, kept while they may still win.

Nodes are visited from the end of the model to its start. At each node, every option that leaves it is put in front of
every label of the node that it leads to. Then labels are dropped whose cheapest completion is too expensive or whose
earliest one is too late (`completion_bounds`), and those that another label of the node dominates (`dominance`). The
labels that reach the start are plans, whose ways of synchronising are chosen then (`path_ways`); until then labels know
only between which ways the choice is (`useful_ways`).

By hand, in the network of two layers in `option_network`: node 1 has one label (option 0). Node 2 has two: option 1 in
front of that label, and option 2 in front of the empty plan. These are the two plans there are.
"""

from collections.abc import Iterator

import numpy as np

from funcpipe.partitioner.cost.arrays import IntArray
from funcpipe.partitioner.search.completion_bounds import CompletionBounds, completion_bounds
from funcpipe.partitioner.search.dominance import Dominance
from funcpipe.partitioner.search.incumbents import Incumbents
from funcpipe.partitioner.search.labels import Labels, extended, paths_of, with_ways
from funcpipe.partitioner.search.time_window import TimeWindow
from funcpipe.partitioner.search.useful_ways import UsefulWays

_BLOCK = 128
"""How many labels are compared with how many at a time: small enough for the cache, large enough for numpy."""
_SAMPLE = 2048
_HARDLY_FEWER = 0.9
"""If of so many labels of a node more than this share is kept, the others are not compared."""


class TooManyLabels(Exception):
    """The window is too wide to be searched label by label."""


def search_labels(
    window: TimeWindow, incumbents: Incumbents, *, pair_limit: float, keep: int | None = None
) -> Iterator[IntArray | None]:
    """Yield None after each node, so that the caller can stop, then the paths of all plans that may be better.

    With `keep`, only the most promising labels of each node are kept, that many: a quick look that proves nothing. A
    path is a column of options from the first stage to the last, filled up with −1. Raises TooManyLabels when more than
    `pair_limit` pairs of labels would have to be compared.
    """
    network = window.network
    bounds = completion_bounds(window)
    useful = UsefulWays.of(bounds, incumbents)
    at_node = [Labels.of_end(len(bounds.ends_s))]
    compared = 0
    for node in range(1, network.start + 1):
        labels = _promising(extended(network, node, at_node, bounds.closing_usd), bounds, node, incumbents)
        labels = with_ways(labels, network, *useful.range(labels, node), bounds.ends_s)
        labels = _promising(labels, bounds, node, incumbents)
        if len(labels) * _SAMPLE > pair_limit:
            raise TooManyLabels
        labels, pairs = _undominated(labels, bounds, node, incumbents, keep)
        compared += pairs
        if compared > pair_limit:
            raise TooManyLabels
        at_node.append(labels)
        yield None
    yield paths_of(network, at_node)


def _promising(labels: Labels, bounds: CompletionBounds, node: int, incumbents: Incumbents) -> Labels:
    """The labels with a completion that may be better than what is known and lie in the window."""
    window = bounds.window
    earliest_s = bounds.earliest_s(labels, node)
    threshold_usd = incumbents.threshold_usd(np.maximum(earliest_s, window.low_s))
    promising = bounds.cheapest_usd(labels, node) < threshold_usd
    return labels.take(promising & (earliest_s <= min(window.high_s, incumbents.latest_s)))


def _undominated(
    labels: Labels, bounds: CompletionBounds, node: int, incumbents: Incumbents, keep: int | None
) -> tuple[Labels, int]:
    """The labels of `node` that no other one dominates, the most promising first; and how many pairs were compared."""
    order = np.argsort(bounds.cheapest_usd(labels, node), kind="stable")
    if keep is not None and incumbents.best == np.inf:  # any plan in time is welcome
        order = _interleaved(order, np.argsort(bounds.earliest_s(labels, node), kind="stable"))
    labels = labels.take(order if keep is None else order[: 4 * keep])
    if node == bounds.window.network.start:
        return labels, 0
    dominance = Dominance.of(labels, bounds, node, incumbents)
    kept, pairs = np.empty(0, dtype=np.int64), 0
    for low in range(0, len(labels), _BLOCK):
        if low >= _SAMPLE and len(kept) > _HARDLY_FEWER * low:  # comparing takes longer than it saves
            kept = np.concatenate([kept, np.arange(low, len(labels))])
            break
        block = np.arange(low, min(low + _BLOCK, len(labels)))
        for some in range(0, len(kept), _BLOCK):
            pairs += len(block) * _BLOCK
            block = block[~dominance.dominated(kept[some : some + _BLOCK], block).any(axis=0)]
        among = dominance.dominated(block, block)
        among &= np.triu(np.ones_like(among), k=1)  # of two that dominate each other, the first one stays
        kept = np.concatenate([kept, block[~among.any(axis=0)]])
    return labels.take(kept[:keep]), pairs


def _interleaved(first: IntArray, second: IntArray) -> IntArray:
    """Two orders of the same numbers as one, which takes from both in turn."""
    both = np.stack([first, second], axis=1).ravel()
    _, places = np.unique(both, return_index=True)
    merged: IntArray = both[np.sort(places)]
    return merged
