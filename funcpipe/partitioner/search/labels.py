"""Labels: partial plans from a node of the network to the end of the model, many at a time.

A label is the `PlanTail` of the cost model, with the way it came about: the `option` in front and the number of the
label behind it, at the node to which that option leads. By hand: the label of the empty plan lies at node 0 with
option −1; putting option 0 in front gives a label at node 1 with option 0 and parent 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from funcpipe.partitioner.cost.arrays import BoolArray, IntArray
from funcpipe.partitioner.cost.pipeline import PlanTail, StageCosts, with_stage
from funcpipe.partitioner.search.option_network import OptionNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Partial plans of one node; an element each."""

    tail: PlanTail
    option: IntArray
    parent: IntArray

    @staticmethod
    def of_end() -> "Labels":
        """The empty plan, at the end of the model."""
        return Labels(tail=PlanTail.empty(1), option=np.array([-1]), parent=np.array([-1]))

    def __len__(self) -> int:
        return len(self.option)

    def take(self, which: IntArray | BoolArray) -> "Labels":
        """Those labels alone, in that order."""
        tail = PlanTail(*(column[which] for column in self.tail))
        return Labels(tail=tail, option=self.option[which], parent=self.parent[which])


def extended(network: OptionNetwork, node: int, at_node: Sequence[Labels]) -> Labels:
    """All labels of `node`: each option that leaves it, in front of each label of the node to which it leads."""
    leaving = np.arange(network.leaving[node], network.leaving[node + 1])
    behind = [at_node[after] for after in network.options.after[leaving]]
    if not behind:
        return Labels.of_end().take(np.empty(0, dtype=np.int64))
    counts = [len(labels) for labels in behind]
    option = np.repeat(leaving, counts)
    tails = PlanTail(*(np.concatenate(columns) for columns in zip(*(labels.tail for labels in behind), strict=True)))
    stage = StageCosts(*(column[option] for column in network.costs))
    return Labels(
        tail=with_stage(tails, stage, repeats=network.repeats),
        option=option,
        parent=np.concatenate([np.arange(count) for count in counts]),
    )


def paths_of(network: OptionNetwork, at_node: Sequence[Labels]) -> IntArray:
    """The paths of the labels at the start: a column of options for each, from the first stage on, then −1."""
    found = []
    for label in range(len(at_node[-1])):
        node, path = network.start, []
        while node:
            option, label = int(at_node[node].option[label]), int(at_node[node].parent[label])
            path.append(option)
            node = int(network.options.after[option])
        found.append(path)
    paths = np.full((max(map(len, found), default=0), len(found)), -1)
    for column, path in enumerate(found):
        paths[: len(path), column] = path
    return paths
