"""Which labels of a window are worth keeping: what all searches through a window have in common.

A label is worth keeping if one of its completions may be better than the best plans known and lie in the window. A
complete plan pays for the requests that its end needs: of all ends that it may have, one must be good enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from funcpipe.partitioner.cost import Array, BoolArray
from funcpipe.partitioner.cost.pipeline import dollars, ended_s
from funcpipe.partitioner.search.completion_bounds import CompletionBounds, completion_bounds
from funcpipe.partitioner.search.incumbents import Incumbents
from funcpipe.partitioner.search.labels import Labels, extended, with_ways
from funcpipe.partitioner.search.time_window import TimeWindow
from funcpipe.partitioner.search.useful_ways import UsefulWays


@dataclass(frozen=True, slots=True, kw_only=True)
class Promising:
    """The labels of a window that may become better plans than the `incumbents`."""

    bounds: CompletionBounds
    useful: UsefulWays
    incumbents: Incumbents

    @staticmethod
    def of(window: TimeWindow, incumbents: Incumbents, *, ends: bool = True) -> "Promising":
        """Those of `window`; without `ends`, labels do not know what they pay for each end, and nobody may ask."""
        bounds = completion_bounds(window)
        if not ends:
            bounds = replace(bounds, ends_s=bounds.ends_s[:1])
        return Promising(bounds=bounds, useful=UsefulWays.of(bounds, incumbents), incumbents=incumbents)

    def of_end(self) -> Labels:
        """The empty plan."""
        return Labels.of_end(len(self.bounds.ends_s))

    def at(self, node: int, at_node: Sequence[Labels]) -> Labels:
        """The labels of `node`: each option that leaves it, in front of each label of the node to which it leads."""
        network = self.bounds.window.network
        labels = self._kept(extended(network, node, at_node, self.bounds.closing_usd), node)
        labels = with_ways(labels, network, *self.useful.range(labels, node), self.bounds.ends_s)
        return self._kept(labels, node)

    def _kept(self, labels: Labels, node: int) -> Labels:
        window, incumbents = self.bounds.window, self.incumbents
        earliest_s = self.bounds.earliest_s(labels, node)
        threshold_usd = incumbents.threshold_usd(np.maximum(earliest_s, window.low_s))
        promising = self.bounds.cheapest_usd(labels, node) < threshold_usd
        return labels.take(promising & (earliest_s <= min(window.high_s, incumbents.latest_s)))

    def good_ends(self, labels: Labels) -> BoolArray:
        """Which of these complete plans have an end, of all that they may have, with which they are good enough.

        Between two of `bounds.ends_s` a plan ends no earlier than at the first, and pays no less than at the second.
        """
        tail, repeats = labels.tail, self.bounds.window.network.repeats
        end_s = np.maximum(self.bounds.ends_s[:-1], tail.finish_s[:, None])
        iteration_s = ended_s(tail.forward_s[:, None], tail.forward_lane_s[:, None], end_s, repeats)
        price_usd_s = tail.price_usd_s[:, None] + self.incumbents.time_value_usd_s
        usd: Array = dollars(price_usd_s, iteration_s, tail.request_usd[:, None] + labels.in_time_usd[:, 1:])
        good = usd < self.incumbents.threshold_usd(iteration_s)
        return np.asarray(good.any(axis=1))
