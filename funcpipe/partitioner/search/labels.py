"""Labels: partial plans from a node of the network to the end of the model, many at a time.

A label is the `PlanTail` of the cost model, with the way it came about: the `option` in front and the number of the
label behind it, at the node to which that option leads.

In which ways its stages synchronise is left open until the plan is complete, when it is known by when they must have
ended. Until then a label ends as early as if all took the fastest way that any completion can use, and pays for the
slowest that is in time: it is a bound of all its plans. `in_time_usd` says what it pays beyond that if its stages have
synchronised by each of `ends_s`, seconds that are the same for all labels of a search and count like `finish_s`; or by
the label's `finish_s` where that is later. `stages` counts the label's stages.

By hand, in the network of two layers in `option_network`:

    node   option   parent   plan
    0      −1                the empty plan
    1      0        0        [1, 2)
    2      1        0        [0, 1) in front of [1, 2)
    2      2        0        [0, 2) in front of the empty plan
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from funcpipe.partitioner.cost import Array, BoolArray, IntArray
from funcpipe.partitioner.cost.pipeline import PlanTail, StageCosts, synchronised_s, with_stage
from funcpipe.partitioner.search.option_network import OptionNetwork

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Partial plans of one node; an element, or a row of `in_time_usd`, each."""

    tail: PlanTail
    option: IntArray
    parent: IntArray
    in_time_usd: Array
    stages: IntArray

    @staticmethod
    def of_end(ends: int) -> "Labels":
        """The empty plan, at the end of the model, with so many ends."""
        return Labels(
            tail=PlanTail.empty(1),
            option=np.array([-1]),
            parent=np.array([-1]),
            in_time_usd=np.zeros((1, ends)),
            stages=np.zeros(1, dtype=np.int64),
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
            in_time_usd=self.in_time_usd[which],
            stages=self.stages[which],
        )


def extended(network: OptionNetwork, node: int, at_node: Sequence[Labels]) -> Labels:
    """All labels of `node`: each option that leaves it, in front of each label of the node to which it leads.

    Left out are options that do not fit with as many stages behind them. The labels do not synchronise the option yet,
    except that they pay for its way `fewest`.
    """
    leaving = np.arange(network.leaving[node], network.leaving[node + 1])
    behind = [at_node[after] for after in network.options.after[leaving]]
    if not behind:
        return at_node[0].take(np.empty(0, dtype=np.int64))
    counts = [len(labels) for labels in behind]
    option = np.repeat(leaving, counts)
    stages = np.concatenate([labels.stages for labels in behind])
    tails = PlanTail(*(np.concatenate(columns) for columns in zip(*(labels.tail for labels in behind), strict=True)))
    shares = network.setting.round_shares(int(stages.max(initial=0)) + 1)[::-1]
    stage = StageCosts(*(column[option] for column in network.costs))
    stage = stage._replace(sync_s=np.zeros(len(option)), share=shares[stages])
    labels = Labels(
        tail=with_stage(tails, stage, repeats=network.meeting_repeats),
        option=option,
        parent=np.concatenate([np.arange(count) for count in counts]),
        in_time_usd=np.concatenate([labels.in_time_usd for labels in behind]),
        stages=stages + 1,
    )
    fits = stages <= network.options.most_behind[option]
    return labels if fits.all() else labels.take(fits)


def with_ways(labels: Labels, network: OptionNetwork, fewest: IntArray, most: IntArray, ends_s: Array) -> Labels:
    """The labels with their options synchronised as fast as in way `most`, for the requests of way `fewest`."""
    options, table = network.options, network.options.ways
    tail = labels.tail
    row = options.row[labels.option]
    seconds = table.seconds[row, most]
    begun_s = synchronised_s(tail.backward_s, tail.backward_lane_s, 0.0, network.meeting_repeats)
    finish_s = np.maximum(tail.finish_s, begun_s + seconds)
    fewest_usd = table.usd_of(row, fewest)
    more_usd = fewest_usd - table.usd_of(row, options.fewest[labels.option])
    in_time = _first_in_time(labels.option, network, np.maximum(ends_s, finish_s[:, None]) - begun_s[:, None])
    in_time = np.minimum(np.maximum(in_time, fewest[:, None]), most[:, None])
    tail = tail._replace(finish_s=finish_s, request_usd=tail.request_usd + more_usd)
    return replace(
        labels,
        tail=tail,
        in_time_usd=labels.in_time_usd + table.usd_of(row[:, None], in_time) - fewest_usd[:, None],
    )


def _first_in_time(option: IntArray, network: OptionNetwork, limits_s: Array) -> IntArray:
    """For each limit of each row the first way of its option that takes no longer; rows are in the order of options."""
    options, seconds = network.options, network.options.ways.seconds
    first = np.empty(limits_s.shape, dtype=np.int64)
    starts = np.flatnonzero(np.diff(option, prepend=-1))
    for low, high in itertools.pairwise([*starts, len(option)]):
        fastest_first = seconds[options.row[option[low]], ::-1]
        within = np.searchsorted(fastest_first, limits_s[low:high] * (1 + _ROUNDING), side="right")
        first[low:high] = seconds.shape[1] - within
    return first


def paths_of(network: OptionNetwork, at_node: Sequence[Labels], which: Iterable[int]) -> IntArray:
    """The paths of some labels at the start: a column of options for each, from the first stage on, then −1."""
    found = []
    for label in which:
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
