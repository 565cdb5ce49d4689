"""The searches through a window: partial plans from the model's end to its start, kept while they may still win.

Nodes are visited from the end of the model to its start. At each node, every option that leaves it is put in front of
every label of the node that it leads to. Then labels are dropped whose cheapest completion is too expensive or whose
earliest one is too late (`Promising`). What happens to the others differs:

- `search_labels` keeps those that no other label of the node dominates (`dominance`). The labels that reach the start
  are plans, whose ways of synchronising are chosen then (`option_network.all_ends`).
- `likely_plans` keeps a few that differ, the most promising of each group of similar labels: it proves nothing, but
  often finds a better plan.
- `needed_options` merges similar labels into one, which is no worse than any of those that it stands for. So what
  bounds its completions bounds theirs, and if no path of merged labels with an option in it is worth keeping, no plan
  with that option is. With few labels for each node this takes little time however many plans there are; it finds no
  plans, but often that there are none, or that a few options are left, among which labels need not be merged. This is a
  relaxed decision diagram (Bergman, Cire, van Hoeve and Hooker, "Discrete Optimization with Decision Diagrams",
  INFORMS Journal on Computing 28(1), 2016).

Labels are points: their seconds there and back, slowest lanes, end, and price, all in dollars of the window. Points in
the same cell of a grid are similar. The grid is the finest of a series that has few enough cells. By hand, with cells
half as large each time: labels at 0, 1, 2, 9 and 10 $ in a single dimension, at most three groups. Cells of 10 $ give
two groups, cells of 5 and 2.5 $ three ({0, 1, 2}, {9}, {10}), and cells of 1.25 $ would give four. Two labels, 4 s for
1 $ and 5 s for 0.5 $, are merged into one of 4 s for 0.5 $. If 4 s and 0.5 $ are too much for every option in front of
them, none of these options is needed behind either label.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from funcpipe.partitioner.cost import Array, BoolArray, IntArray
from funcpipe.partitioner.cost.pipeline import PlanTail
from funcpipe.partitioner.search.completion_bounds import CompletionBounds, Promising
from funcpipe.partitioner.search.dominance import Dominance
from funcpipe.partitioner.search.incumbents import Incumbents
from funcpipe.partitioner.search.labels import Labels, paths_of
from funcpipe.partitioner.search.time_window import TimeWindow

_FINER = 1.4
"""How much smaller the cells of a grid are than those of the one before."""
_GRIDS = 60
_CELLS = 2**62
"""How many grids are tried at most, and of how many cells."""


def similar(labels: Labels, bounds: CompletionBounds, node: int, count: int) -> IntArray:
    """For each label of `node` the number of its group, of `count` at most; labels in a group have as many stages.

    There may be more groups than `count` where there are more numbers of stages.
    """
    if len(labels) <= count:
        return np.arange(len(labels))
    return grouped(_points(labels, bounds, node), labels.stages, count)


def grouped(points: Array, kind: IntArray, count: int) -> IntArray:
    """The group of each point (a column): its cell in the finest grid in which the points fill at most `count` cells.

    Points of different kinds are in different groups, in whatever grid.
    """
    points = points - points.min(axis=1, keepdims=True)
    kinds, kind_of = np.unique(kind, return_inverse=True)
    groups = kind_of
    size = float(points.max())
    for _ in range(_GRIDS if size > 0 else 0):
        size /= _FINER
        cells = (points / size).astype(np.int64)
        shape = (len(kinds), *(cells.max(axis=1) + 1).tolist())
        if math.prod(shape) > _CELLS:
            break
        _, finer = np.unique(np.ravel_multi_index((kind_of, *cells), shape), return_inverse=True)
        if finer.max() >= count:
            break
        groups = finer
    return groups


def merged(labels: Labels, group: IntArray) -> Labels:
    """For each group a label no worse than any of it; it has no option of its own and no parent."""
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))

    def least(values: Array) -> Array:
        found: Array = np.minimum.reduceat(values[order], starts, axis=0)
        return found

    none = np.full(len(starts), -1)
    return Labels(
        tail=PlanTail(*map(least, labels.tail)),
        option=none,
        parent=none,
        in_time_usd=least(labels.in_time_usd),
        stages=labels.stages[order][starts],
    )


def _points(labels: Labels, bounds: CompletionBounds, node: int) -> Array:
    """The coordinates of labels, in dollars: a row for each kind."""
    window, tail = bounds.window, labels.tail
    repeats = window.network.repeats
    forward_lane_s = np.maximum(tail.forward_lane_s, bounds.forward_lane_s[node])
    backward_lane_s = np.maximum(tail.backward_lane_s, bounds.backward_lane_s[node])
    seconds = [
        tail.forward_s + tail.backward_s,
        repeats * forward_lane_s,
        repeats * backward_lane_s,
        tail.forward_s + np.maximum(tail.finish_s, bounds.closed_s(labels, node)),
    ]
    return np.stack([*(window.slope_usd * each for each in seconds), window.low_s * tail.price_usd_s])


_BLOCK = 128
"""How many labels are compared with how many at a time: small enough for the cache, large enough for numpy."""
_SAMPLE = 2048
_HARDLY_FEWER = 0.9
"""If of so many labels of a node more than this share is kept, the others are not compared."""
_PATHS, _FEW_PATHS = 16, 192
"""How many paths are found at a time, so that the best of them may make the others useless; and by `likely_plans`."""


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
            _, first = np.unique(similar(labels, promising.bounds, node, keep), return_index=True)
            labels = labels.take(np.sort(first))
        at_node.append(labels)
    yield from itertools.islice(_plans(promising, at_node), _FEW_PATHS // _PATHS)


def _in_order(labels: Labels, promising: Promising, node: int, *, early: bool = False) -> Labels:
    """The most promising first; with `early`, those that end first among them, in turn."""
    order = np.argsort(promising.bounds.cheapest_usd(labels, node), kind="stable")
    if early:
        soonest = np.argsort(promising.bounds.earliest_s(labels, node), kind="stable")
        both = np.stack([order, soonest], axis=1).ravel()
        order = both[np.sort(np.unique(both, return_index=True)[1])]
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


def needed_options(window: TimeWindow, incumbents: Incumbents, *, labels: int) -> BoolArray:
    """The options of the window without which some plan better than the incumbents may not do.

    A plan whose own stages do better in other ways of synchronising does not count. At most so many `labels` are kept
    of each node, or one for each number of stages.
    """
    network = window.network
    promising = Promising.of(window, incumbents, ends=False)
    at_node, links = [promising.of_end()], [(np.empty(0, dtype=np.int64),) * 3]
    for node in range(1, network.start + 1):
        found = promising.at(node, at_node)
        group = similar(found, promising.bounds, node, labels)
        links.append((found.option, found.parent, group))
        at_node.append(merged(found, group) if len(found) else found)
    return _on_paths(network.options.after, [len(labels) for labels in at_node], links)


def _on_paths(after: IntArray, counts: list[int], links: list[tuple[IntArray, IntArray, IntArray]]) -> BoolArray:
    """Which options are on a path from a label at the start.

    `links` has for each node the options in front of their labels, the labels behind these, and the groups they are in.
    """
    needed = np.zeros(len(after), dtype=bool)
    reached = [np.zeros(count, dtype=bool) for count in counts]
    reached[-1][:] = True
    for node in reversed(range(1, len(links))):
        option, parent, group = links[node]
        used = reached[node][group]
        needed[option[used]] = True
        for behind in np.unique(after[option[used]]):
            reached[behind][parent[used & (after[option] == behind)]] = True
    return needed
