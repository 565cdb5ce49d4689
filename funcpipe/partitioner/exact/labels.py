"""The search inside a window: partial plans from the model's end to its start, kept while they may still win.

A label is a partial plan from a node of the stage graph to the end of the model. At each node a label is dropped when
its cheapest completion is too dear, or when another label of the node is at least as good however both are completed.
In a window the seconds of a plan and what its seconds cost are known within narrow limits, so that seconds and dollars
can be traded against each other and most labels lose against one of a few.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from funcpipe.partitioner.exact.aims import Aim
from funcpipe.partitioner.exact.field import Field
from funcpipe.partitioner.exact.relaxation import from_start, ladder
from funcpipe.partitioner.exact.window import Window
from funcpipe.partitioner.formulas import Array
from funcpipe.partitioner.options import BoolArray
from funcpipe.partitioner.stage_graph import IntArray

_BLOCK = 128
_RUNGS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Partial plans of one node; an element each. `finish_s` is when the last of their stages has synchronised, counted
    from the first backward; `parent` the label behind `option` at the node that it leads to.
    """

    forward_s: Array
    forward_lane_s: Array
    backward_s: Array
    backward_lane_s: Array
    finish_s: Array
    price_usd_s: Array
    request_usd: Array
    work_s: Array
    option: IntArray
    parent: IntArray

    def take(self, which: IntArray | BoolArray) -> "Labels":
        """Those labels alone, in that order."""
        return Labels(**{item.name: getattr(self, item.name)[which] for item in fields(self)})


class TooManyLabels(Exception):
    """The window is too wide to be searched label by label."""


def search(window: Window, aim: Aim, *, label_limit: float) -> Iterator[IntArray | None]:
    """Yield None after each node, then the paths of all plans of `window` that may be what `aim` is after.

    A path is a column of options from the first stage to the last, filled up with −1. Raises TooManyLabels when more
    than `label_limit` labels would have to be compared.
    """
    field = window.field
    horizon = _horizon(window)
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


def _paths(field: Field, at_node: list[Labels]) -> IntArray:
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


def _extended(field: Field, node: int, at_node: list[Labels]) -> Labels:
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
    backward_lane_s = np.maximum(old["backward_lane_s"], options.backward_max_s[option])
    own_finish_s = backward_s + field.repeats * backward_lane_s + options.sync_s[option]
    return Labels(
        forward_s=old["forward_s"] + options.forward_sum_s[option],
        forward_lane_s=np.maximum(old["forward_lane_s"], options.forward_max_s[option]),
        backward_s=backward_s,
        backward_lane_s=backward_lane_s,
        finish_s=np.maximum(old["finish_s"], own_finish_s),
        price_usd_s=old["price_usd_s"] + options.price_usd_s[option],
        request_usd=old["request_usd"] + options.request_usd[option],
        work_s=old["work_s"] + options.work_s[option],
        option=option,
        parent=parent,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Horizon:
    """What lies before each node, at least: the sums and the slowest lanes of any completion.

    `whole_usd[n, g]` holds dollars under cap g of the lanes, above which no lane before the node lies;
    `later_usd[n, g]` those of this and all higher caps with the lanes' own dollars, the least of them.
    """

    window: Window
    lows_s: Array
    whole_usd: Array
    later_usd: Array
    forward_usd: Array
    untimed_usd: Array
    work_usd: Array
    lanes_s: Array
    closing_s: Array
    rest_s: Array
    forward_s: Array
    forward_lane_s: Array
    backward_lane_s: Array

    def earliest_s(self, labels: Labels, node: int) -> Array:
        """The least seconds of an iteration of any completion."""
        repeats = self.window.field.repeats
        lane_s = np.maximum(labels.forward_lane_s + labels.backward_lane_s, self.lanes_s[node])
        whole_s = labels.forward_s + labels.backward_s + self.rest_s[node] + repeats * lane_s
        forward_lane_s = np.maximum(labels.forward_lane_s, self.forward_lane_s[node])
        finished_s = labels.forward_s + self.forward_s[node] + repeats * forward_lane_s + labels.finish_s
        result: Array = np.maximum(whole_s, finished_s)
        return result

    def cheapest_usd(self, labels: Labels, node: int) -> Array:
        """The least dollars of any completion that lies in the window, value of time included."""
        window, repeats = self.window, self.window.field.repeats
        second_usd = window.second_usd
        paid = window.low_s * labels.price_usd_s + labels.request_usd + window.offset_usd
        lane_s = labels.forward_lane_s + labels.backward_lane_s
        rung = np.searchsorted(self.lows_s, lane_s, side="right")
        at_rung = self.whole_usd[node][np.maximum(rung - 1, 0)] + second_usd * repeats * lane_s
        lanes = np.minimum(np.where(rung > 0, at_rung, np.inf), self.later_usd[node][rung])
        whole = second_usd * (labels.forward_s + labels.backward_s) + lanes
        finished_s = labels.forward_s + repeats * labels.forward_lane_s + labels.finish_s
        finished = self.forward_usd[node] + second_usd * finished_s
        untimed = self.untimed_usd[node] + second_usd * window.low_s
        worked = self.work_usd[node] + _work_usd_s(window) * labels.work_s
        result: Array = paid + np.maximum(np.maximum(whole, finished), np.maximum(untimed, worked))
        return result


def _work_usd_s(window: Window) -> float:
    cores = window.field.setting.spec.shared_cores
    return 0.0 if cores is None else window.second_usd / cores


def _horizon(window: Window) -> _Horizon:
    field, options, second_usd = window.field, window.field.options, window.second_usd
    rungs = ladder(field, _RUNGS)
    priced_usd, whole_s = window.priced_usd, options.forward_sum_s + field.closing_s
    dollars = [
        second_usd * whole_s,
        second_usd * options.forward_sum_s,
        0 * whole_s,
        _work_usd_s(window) * options.work_s,
    ]
    seconds = [field.closing_s, whole_s, options.forward_sum_s]
    weights = np.stack([*(priced_usd + more for more in dollars), *seconds], axis=1)
    ahead = from_start(field, weights, rungs.barred)
    with_lanes = ahead[:, 0] + second_usd * field.repeats * rungs.lows_s
    later = np.minimum.accumulate(with_lanes[:, ::-1], axis=1)[:, ::-1]
    return _Horizon(
        window=window,
        lows_s=rungs.lows_s,
        whole_usd=ahead[:, 0],
        later_usd=np.concatenate([later, np.full((len(later), 1), np.inf)], axis=1),
        forward_usd=ahead[:, 1, -1],
        untimed_usd=ahead[:, 2, -1],
        work_usd=ahead[:, 3, -1],
        closing_s=ahead[:, 4, -1],
        rest_s=ahead[:, 5, -1],
        forward_s=ahead[:, 6, -1],
        lanes_s=_least_peak(field, field.lane_s),
        forward_lane_s=_least_peak(field, options.forward_max_s),
        backward_lane_s=_least_peak(field, options.backward_max_s),
    )


def _least_peak(field: Field, peak: Array) -> Array:
    """For each node the least that the greatest `peak` on a path from the start to it can be."""
    least = np.full(field.start + 1, np.inf)
    least[field.start] = 0.0
    for node in range(field.start - 1, -1, -1):
        entering = field.by_after[field.entering[node] : field.entering[node + 1]]
        if len(entering):
            least[node] = np.maximum(least[field.options.before[entering]], peak[entering]).min()
    return least


def _undominated(labels: Labels, horizon: _Horizon, node: int, aim: Aim) -> Labels:
    """The labels of `node` that no other one beats, the most promising first."""
    labels = labels.take(np.argsort(horizon.cheapest_usd(labels, node), kind="stable"))
    if node == horizon.window.field.start:
        return labels
    duel = _Duel.of(labels, horizon, node, aim)
    kept = np.empty(0, dtype=np.int64)
    for low in range(0, len(labels.option), _BLOCK):
        block = np.arange(low, min(low + _BLOCK, len(labels.option)))
        for some in range(0, len(kept), _BLOCK):
            block = block[~duel.wins(kept[some : some + _BLOCK], block).any(axis=0)]
        among = duel.wins(block, block)
        among &= np.triu(np.ones_like(among), k=1)
        kept = np.concatenate([kept, block[~among.any(axis=0)]])
    return labels.take(kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Duel:
    """Whether one label is at least as good as another however both are completed.

    Let A and B be labels and T, Q the seconds and the dollars per second of a completion of B in the window. Completed
    alike, A takes at most `slower` more seconds than B; its functions cost `dearer` more dollars a second. Then A's
    dollars exceed B's by at most slower · (Q + dearer) + dearer · T + the difference of their requests.
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
    most_slower_s: float
    least_gain_usd: float

    @staticmethod
    def of(labels: Labels, horizon: _Horizon, node: int, aim: Aim) -> "_Duel":
        window = horizon.window
        repeats = window.field.repeats
        cores = window.field.setting.spec.shared_cores
        forward_lane_s = repeats * np.maximum(labels.forward_lane_s, horizon.forward_lane_s[node])
        backward_lane_s = repeats * np.maximum(labels.backward_lane_s, horizon.backward_lane_s[node])
        closed_s = labels.backward_s + horizon.closing_s[node] + backward_lane_s
        threshold_usd = float(aim.threshold_usd(np.array([window.low_s]))[0])
        return _Duel(
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
            most_slower_s=max(0.0, aim.latest_s - window.high_s) if aim.slower_may_win else 0.0,
            least_gain_usd=1e-12 * threshold_usd,
        )

    def wins(self, these: IntArray, those: IntArray) -> BoolArray:
        """Element [i, j]: whether label these[i] makes label those[j] needless."""

        def more(values: Array) -> Array:
            result: Array = values[these][:, None] - values[those]
            return result

        forward_lane_s = np.maximum(more(self.forward_lane_s), 0.0)
        slower_s = more(self.whole_s) + forward_lane_s + np.maximum(more(self.backward_lane_s), 0.0)
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
