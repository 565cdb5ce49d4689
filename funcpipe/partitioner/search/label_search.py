"""The search inside a window: partial plans from the model's end to its start, kept while they may still win.

Nodes are visited from the end of the model to its start. At each node, every option that leaves it is put in front of
every label of the node that it leads to. Then labels are dropped whose cheapest completion is too expensive or whose
earliest one is too late (`promising`), and those that another label of the node dominates (`dominance`). The
labels that reach the start are plans, whose ways of synchronising are chosen then (`path_ways`); until then labels know
only between which ways the choice is (`useful_ways`).

A quick look keeps a few labels of each node that differ, the most promising of each group (`alike`): it proves nothing,
but often finds a better plan.

By hand, in the network of two layers in `option_network`: node 1 has one label (option 0). Node 2 has two: option 1 in
front of that label, and option 2 in front of the empty plan. These are the two plans there are.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from funcpipe.partitioner.cost import IntArray
from funcpipe.partitioner.search.alike import alike
from funcpipe.partitioner.search.completion_bounds import CompletionBounds
from funcpipe.partitioner.search.dominance import Dominance
from funcpipe.partitioner.search.incumbents import Incumbents
from funcpipe.partitioner.search.labels import Labels, paths_of
from funcpipe.partitioner.search.promising import Promising
from funcpipe.partitioner.search.time_window import TimeWindow

_BLOCK = 128
"""How many labels are compared with how many at a time: small enough for the cache, large enough for numpy."""
_SAMPLE = 2048
_HARDLY_FEWER = 0.9
"""If of so many labels of a node more than this share is kept, the others are not compared."""
_PATHS, _FEW_PATHS = 16, 192
"""How many paths are found at a time, so that the best of them may make the others useless; and by a quick look."""


class TooManyLabels(Exception):
    """The window is too wide to be searched label by label."""


def search_labels(window: TimeWindow, incumbents: Incumbents, *, pair_limit: float) -> Iterator[IntArray | None]:
    """Yield None after each node, so that the caller can stop, then the paths of all plans that may be better.

    A path is a column of options from the first stage to the last, filled up with −1. Some paths are yielded at a time,
    the most promising first. Raises TooManyLabels when more than `pair_limit` pairs of labels would have to be
    compared.
    """
    promising = Promising.of(window, incumbents)
    at_node = [promising.of_end()]
    compared = 0
    for node in range(1, window.network.start + 1):
        labels = promising.at(node, at_node)
        if len(labels) * _SAMPLE > pair_limit:
            raise TooManyLabels
        labels, pairs = _undominated(_in_order(labels, promising, node), promising.bounds, node, incumbents)
        compared += pairs
        if compared > pair_limit:
            raise TooManyLabels
        at_node.append(labels)
        yield None
    yield from _plans(promising, at_node)


def likely_plans(window: TimeWindow, incumbents: Incumbents, *, keep: int) -> Iterator[IntArray]:
    """Paths of plans that may be better, as `search_labels`, if of each node only about `keep` labels are kept.

    While any plan in time is welcome, these are the most promising and the earliest, whether they differ or not.
    """
    network, early = window.network, incumbents.best == np.inf
    promising = Promising.of(window, incumbents)
    at_node = [promising.of_end()]
    for node in range(1, network.start + 1):
        labels = _in_order(promising.at(node, at_node), promising, node, early=early)
        if early:
            labels = labels.take(np.arange(min(len(labels), keep)))
        elif node < network.start:
            _, first = np.unique(alike(labels, promising.bounds, node, keep), return_index=True)
            labels = labels.take(np.sort(first))
        at_node.append(labels)
    yield from itertools.islice(_plans(promising, at_node), _FEW_PATHS // _PATHS)


def _in_order(labels: Labels, promising: Promising, node: int, *, early: bool = False) -> Labels:
    """The most promising first, and if any plan in time is welcome, those that end early among them."""
    order = np.argsort(promising.bounds.cheapest_usd(labels, node), kind="stable")
    if early:
        order = _interleaved(order, np.argsort(promising.bounds.earliest_s(labels, node), kind="stable"))
    return labels.take(order)


def _plans(promising: Promising, at_node: Sequence[Labels]) -> Iterator[IntArray]:
    """The paths of the labels at the start that are good enough, when they are asked for."""
    complete = at_node[-1]
    for low in range(0, len(complete), _PATHS):
        some = np.arange(low, min(low + _PATHS, len(complete)))
        some = some[promising.good_ends(complete.take(some))]
        if len(some):
            yield paths_of(promising.bounds.window.network, at_node, some.tolist())


def _undominated(labels: Labels, bounds: CompletionBounds, node: int, incumbents: Incumbents) -> tuple[Labels, int]:
    """The labels of `node` that none before them dominates; and how many pairs were compared."""
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
    return labels.take(kept), pairs


def _interleaved(first: IntArray, second: IntArray) -> IntArray:
    """Two orders of the same numbers as one, which takes from both in turn."""
    both = np.stack([first, second], axis=1).ravel()
    _, places = np.unique(both, return_index=True)
    merged: IntArray = both[np.sort(places)]
    return merged
