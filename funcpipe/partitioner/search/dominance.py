"""Duels of labels: whether one makes another needless, however both are completed."""

from dataclasses import dataclass

import numpy as np

from funcpipe.partitioner.cost.formulas import Array
from funcpipe.partitioner.problem.options import BoolArray
from funcpipe.partitioner.problem.stage_graph import IntArray
from funcpipe.partitioner.search.completion_bounds import CompletionBounds, Labels
from funcpipe.partitioner.search.incumbents import Aim


@dataclass(frozen=True, slots=True, kw_only=True)
class Dominance:
    """Whether one label is at least as good as another however both are completed.

    Let A and B be labels and T, Q the seconds and the dollars per second of a completion of B in the window. Completed
    alike, A takes at most `slower` more seconds than B; its functions cost `dearer` more dollars a second. Then A's
    dollars exceed B's by at most slower · (Q + dearer) + dearer · T + the difference of their requests.

    What A takes longer there and back than B, the stages in front may wait for in every round: `rounds` times.
    """

    whole_s: Array
    finished_s: Array
    work_s: Array
    forward_lane_s: Array
    backward_lane_s: Array
    price_usd_s: Array
    request_usd: Array
    low_s: float
    high_s: float
    low_usd_s: float
    high_usd_s: float
    rounds: float
    most_slower_s: float
    least_gain_usd: float

    @staticmethod
    def of(labels: Labels, horizon: CompletionBounds, node: int, aim: Aim) -> "Dominance":
        """The duel of the `labels` of a node."""
        window = horizon.window
        repeats = window.field.repeats
        cores = window.field.setting.spec.shared_cores
        forward_lane_s = repeats * np.maximum(labels.forward_lane_s, horizon.forward_lane_s[node])
        # a stage in front synchronises after the backwards of itself and of those behind: of the other stages in
        # front only the one right before the node is surely among these
        backward_lane_s = repeats * np.maximum(labels.backward_lane_s, horizon.next_backward_lane_s[node])
        slowest_s = repeats * np.maximum(labels.backward_lane_s, horizon.backward_lane_s[node])
        closed_s = labels.backward_s + horizon.closing_s[node] + slowest_s
        threshold_usd = float(aim.threshold_usd(np.array([window.low_s]))[0])
        return Dominance(
            whole_s=labels.forward_s + labels.backward_s,
            finished_s=labels.forward_s + np.maximum(labels.finish_s, closed_s),
            work_s=labels.work_s / cores if cores is not None else np.zeros_like(labels.work_s),
            forward_lane_s=forward_lane_s,
            backward_lane_s=backward_lane_s,
            price_usd_s=labels.price_usd_s,
            request_usd=labels.request_usd,
            low_s=window.low_s,
            high_s=window.high_s,
            low_usd_s=window.second_usd,
            high_usd_s=max(threshold_usd / window.low_s, window.second_usd),
            rounds=repeats * float(horizon.next_share[node]),
            most_slower_s=max(0.0, aim.latest_s - window.high_s) if aim.slower_may_win else 0.0,
            least_gain_usd=1e-12 * threshold_usd,
        )

    def wins(self, these: IntArray, those: IntArray) -> BoolArray:
        """Element [i, j]: whether label these[i] makes label those[j] needless."""

        def more(values: Array) -> Array:
            result: Array = values[these][:, None] - values[those]
            return result

        whole_s = more(self.whole_s)
        forward_lane_s = np.maximum(np.maximum(more(self.forward_lane_s), self.rounds * whole_s), 0.0)
        slower_s = whole_s + forward_lane_s + np.maximum(more(self.backward_lane_s), 0.0)
        slower_s = np.maximum(slower_s, more(self.finished_s) + forward_lane_s)
        slower_s = np.maximum(slower_s, more(self.work_s))
        dearer_usd_s = more(self.price_usd_s)
        loss_usd = dearer_usd_s * np.where(dearer_usd_s > 0, self.high_s, self.low_s) + more(self.request_usd)
        loss_usd += slower_s * (np.where(slower_s > 0, self.high_usd_s, self.low_usd_s) + dearer_usd_s)
        faster = slower_s <= 0
        wins: BoolArray = faster & (loss_usd <= 0)
        if self.most_slower_s > 0:
            wins |= (slower_s <= self.most_slower_s) & (loss_usd <= -self.least_gain_usd)
        return wins
