"""Labels: partial plans from a node of the network to the end of the model, many at a time.

A label is the `PlanTail` of the cost model, with the way it came about: the `option` in front and the number of the
label behind it, at the node to which that option leads.

In which ways its stages synchronise is left open until the plan is complete, when it is known by when they must have
ended. Until then a label ends as early as if all took the fastest way that any completion can use, and pays for the
slowest that is in time: it is a bound of all its plans. For `spare_usd` more it is such a plan. `mean_usd` is the
least that the weighted mean of its stages' ends costs beyond that, with the requests of the ways that are best for it.

By hand: the label of the empty plan lies at node 0 with
option −1; putting option 0 in front gives a label at node 1 with option 0 and parent 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from funcpipe.partitioner.cost.arrays import Array, BoolArray, IntArray
from funcpipe.partitioner.cost.pipeline import PlanTail, StageCosts, synchronised_s, with_stage
from funcpipe.partitioner.search.option_network import OptionNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Partial plans of one node; an element each."""

    tail: PlanTail
    option: IntArray
    parent: IntArray
    spare_usd: Array
    mean_usd: Array

    @staticmethod
    def of_end() -> "Labels":
        """The empty plan, at the end of the model."""
        return Labels(
            tail=PlanTail.empty(1),
            option=np.array([-1]),
            parent=np.array([-1]),
            spare_usd=np.zeros(1),
            mean_usd=np.zeros(1),
        )

    def __len__(self) -> int:
        return len(self.option)

    def take(self, which: IntArray | BoolArray) -> "Labels":
        """Those labels alone, in that order."""
        tail = PlanTail(*(column[which] for column in self.tail))
        return Labels(
            tail=tail,
            option=self.option[which],
            parent=self.parent[which],
            spare_usd=self.spare_usd[which],
            mean_usd=self.mean_usd[which],
        )


def extended(network: OptionNetwork, node: int, at_node: Sequence[Labels], closing_usd: Array) -> Labels:
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
        spare_usd=np.concatenate([labels.spare_usd for labels in behind]),
        mean_usd=np.concatenate([labels.mean_usd for labels in behind]) + closing_usd[option],
    )


def with_ways(labels: Labels, network: OptionNetwork, fewest: IntArray, most: IntArray) -> Labels:
    """The labels with their options synchronised as fast as in way `most`, for the requests of way `fewest`."""
    options, table = network.options, network.options.ways
    tail = labels.tail
    seconds = table.seconds[options.row[labels.option], most]
    finish_s = synchronised_s(tail.backward_s, tail.backward_lane_s, seconds, network.repeats)
    more_usd = table.usd[fewest] - table.usd[options.fewest[labels.option]]
    tail = tail._replace(finish_s=np.maximum(tail.finish_s, finish_s), request_usd=tail.request_usd + more_usd)
    return replace(
        labels,
        tail=tail,
        spare_usd=labels.spare_usd + table.usd[most] - table.usd[fewest],
        mean_usd=labels.mean_usd - more_usd,
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
