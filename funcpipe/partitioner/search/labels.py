"""Labels: partial plans from a node of the network to the end of the model, many at a time.

A label is the `PlanTail` of the cost model, with the way it came about: the `option` in front and the number of the
label behind it, at the node to which that option leads, and the `way` in which the option's replicas synchronise. By
hand: the label of the empty plan lies at node 0 with
option −1; putting option 0 in front gives a label at node 1 with option 0 and parent 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from funcpipe.partitioner.cost.arrays import BoolArray, IntArray
from funcpipe.partitioner.cost.pipeline import PlanTail, StageCosts, synchronised_s, with_stage
from funcpipe.partitioner.search.option_network import OptionNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Partial plans of one node; an element each."""

    tail: PlanTail
    option: IntArray
    parent: IntArray
    way: IntArray

    @staticmethod
    def of_end() -> "Labels":
        """The empty plan, at the end of the model."""
        return Labels(tail=PlanTail.empty(1), option=np.array([-1]), parent=np.array([-1]), way=np.array([-1]))

    def __len__(self) -> int:
        return len(self.option)

    def take(self, which: IntArray | BoolArray) -> "Labels":
        """Those labels alone, in that order."""
        tail = PlanTail(*(column[which] for column in self.tail))
        return Labels(tail=tail, option=self.option[which], parent=self.parent[which], way=self.way[which])


def extended(network: OptionNetwork, node: int, at_node: Sequence[Labels]) -> Labels:
    """All labels of `node`: each option that leaves it, in front of each label of the node to which it leads.

    They do not synchronise the option yet, except that they pay for its way `fewest`.
    """
    leaving = np.arange(network.leaving[node], network.leaving[node + 1])
    behind = [at_node[after] for after in network.options.after[leaving]]
    if not behind:
        return Labels.of_end().take(np.empty(0, dtype=np.int64))
    counts = [len(labels) for labels in behind]
    option = np.repeat(leaving, counts)
    tails = PlanTail(*(np.concatenate(columns) for columns in zip(*(labels.tail for labels in behind), strict=True)))
    stage = StageCosts(*(column[option] for column in network.costs))._replace(sync_s=np.zeros(len(option)))
    return Labels(
        tail=with_stage(tails, stage, repeats=network.repeats),
        option=option,
        parent=np.concatenate([np.arange(count) for count in counts]),
        way=network.options.fewest[option],
    )


def with_ways(labels: Labels, network: OptionNetwork, fewest: IntArray, most: IntArray) -> Labels:
    """The labels with their options synchronised: once for each way of those from `fewest` to `most` that count."""
    options, table = network.options, network.options.ways
    counts = most - fewest + 1
    which = np.repeat(np.arange(len(labels)), counts)
    way = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - fewest, counts)
    row = options.row[labels.option[which]]
    seconds = table.seconds[row, way]
    counted = (way == fewest[which]) | (seconds < table.seconds[row, way - 1])
    which, way, seconds = which[counted], way[counted], seconds[counted]
    taken = labels.take(which)
    tail = taken.tail
    finish_s = synchronised_s(tail.backward_s, tail.backward_lane_s, seconds, network.repeats)
    tail = tail._replace(
        finish_s=np.maximum(tail.finish_s, finish_s),
        request_usd=tail.request_usd + table.usd[way] - table.usd[options.fewest[taken.option]],
    )
    return replace(taken, tail=tail, way=way)


def paths_of(network: OptionNetwork, at_node: Sequence[Labels]) -> tuple[IntArray, IntArray]:
    """The paths of the labels at the start: a column of options for each, from the first stage on, then −1.

    The second array holds the way of each option.
    """
    found = []
    for label in range(len(at_node[-1])):
        node, path = network.start, []
        while node:
            labels = at_node[node]
            option = int(labels.option[label])
            path.append((option, int(labels.way[label])))
            node, label = int(network.options.after[option]), int(labels.parent[label])
        found.append(path)
    paths = np.full((2, max(map(len, found), default=0), len(found)), -1)
    for column, path in enumerate(found):
        paths[:, : len(path), column] = np.transpose(path)
    return paths[0], paths[1]
