"""The search inside a window: partial plans from the model's end to its start, kept while they may still win.

A label is a partial plan from a node of the stage graph to the end of the model. At each node a label is dropped when
its cheapest completion is too dear, or when another label of the node is at least as good however both are completed.
In a window the seconds of a plan and what its seconds cost are known within narrow limits, so that seconds and dollars
can be traded against each other and most labels lose against one of a few.
"""

from collections.abc import Iterator
from dataclasses import fields

import numpy as np

from funcpipe.partitioner.problem.stage_graph import IntArray
from funcpipe.partitioner.search.completion_bounds import CompletionBounds, Labels, completion_bounds
from funcpipe.partitioner.search.dominance import Dominance
from funcpipe.partitioner.search.incumbents import Aim
from funcpipe.partitioner.search.option_network import OptionNetwork
from funcpipe.partitioner.search.time_window import TimeWindow

_BLOCK = 128


class TooManyLabels(Exception):
    """The window is too wide to be searched label by label."""


def search(window: TimeWindow, aim: Aim, *, label_limit: float) -> Iterator[IntArray | None]:
    """Yield None after each node, then the paths of all plans of `window` that may be what `aim` is after.

    A path is a column of options from the first stage to the last, filled up with −1. Raises TooManyLabels when more
    than `label_limit` labels would have to be compared.
    """
    field = window.field
    horizon = completion_bounds(window)
    nothing = np.zeros(1)
    columns = {item.name: nothing for item in fields(Labels)}
    at_node = [Labels(**{**columns, "option": np.array([-1]), "parent": np.array([-1])})]
    compared = 0
    for node in range(1, field.start + 1):
        labels = _extended(field, node, at_node)
        earliest_s = horizon.earliest_s(labels, node)
        threshold_usd = aim.threshold_usd(np.maximum(earliest_s, window.low_s))
        worth = horizon.cheapest_usd(labels, node) < threshold_usd
        labels = labels.take(worth & (earliest_s <= min(window.high_s, aim.latest_s)))
        compared += len(labels.option)
        if compared > label_limit:
            raise TooManyLabels
        at_node.append(_undominated(labels, horizon, node, aim))
        yield None
    yield _paths(field, at_node)


def _paths(field: OptionNetwork, at_node: list[Labels]) -> IntArray:
    found = []
    for label in range(len(at_node[-1].option)):
        node, path = field.start, []
        while node:
            option, label = int(at_node[node].option[label]), int(at_node[node].parent[label])
            path.append(option)
            node = int(field.options.after[option])
        found.append(path)
    paths = np.full((max(map(len, found), default=0), len(found)), -1)
    for column, path in enumerate(found):
        paths[: len(path), column] = path
    return paths


def _extended(field: OptionNetwork, node: int, at_node: list[Labels]) -> Labels:
    """All labels of the nodes behind `node`, each with each option that leads there put in front."""
    chosen = np.arange(field.leaving[node], field.leaving[node + 1])
    behind = [at_node[after] for after in field.options.after[chosen]]
    counts = [len(labels.option) for labels in behind]
    option = np.repeat(chosen, counts)
    parent = np.concatenate([np.arange(count) for count in counts]) if counts else np.empty(0, dtype=np.int64)
    old = {
        item.name: np.concatenate([getattr(labels, item.name) for labels in behind]) if behind else np.empty(0)
        for item in fields(Labels)[:8]
    }
    options = field.options
    backward_s = old["backward_s"] + options.backward_sum_s[option]
    backward_lane_s = np.maximum(old["backward_lane_s"], options.backward_lane_s[option])
    pace_s = (old["forward_s"] + old["backward_s"] + options.round_s[option]) * options.share[option]
    pace_s = np.maximum(pace_s, options.forward_lane_s[option])
    own_finish_s = backward_s + field.repeats * backward_lane_s + options.sync_s[option]
    return Labels(
        forward_s=old["forward_s"] + options.forward_sum_s[option],
        forward_lane_s=np.maximum(old["forward_lane_s"], pace_s),
        backward_s=backward_s,
        backward_lane_s=backward_lane_s,
        finish_s=np.maximum(old["finish_s"], own_finish_s),
        price_usd_s=old["price_usd_s"] + options.price_usd_s[option],
        request_usd=old["request_usd"] + options.request_usd[option],
        work_s=old["work_s"] + options.work_s[option],
        option=option,
        parent=parent,
    )


def _undominated(labels: Labels, horizon: CompletionBounds, node: int, aim: Aim) -> Labels:
    """The labels of `node` that no other one beats, the most promising first."""
    labels = labels.take(np.argsort(horizon.cheapest_usd(labels, node), kind="stable"))
    if node == horizon.window.field.start:
        return labels
    duel = Dominance.of(labels, horizon, node, aim)
    kept = np.empty(0, dtype=np.int64)
    for low in range(0, len(labels.option), _BLOCK):
        block = np.arange(low, min(low + _BLOCK, len(labels.option)))
        for some in range(0, len(kept), _BLOCK):
            block = block[~duel.wins(kept[some : some + _BLOCK], block).any(axis=0)]
        among = duel.wins(block, block)
        among &= np.triu(np.ones_like(among), k=1)
        kept = np.concatenate([kept, block[~among.any(axis=0)]])
    return labels.take(kept)
