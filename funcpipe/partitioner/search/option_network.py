"""The options of one setting, laid out for shortest paths over the stage graph, and what a chosen path takes."""

from dataclasses import dataclass

import numpy as np

from funcpipe.partitioner.cost.formulas import Array, Setting, round_shares
from funcpipe.partitioner.problem.options import BoolArray, Options
from funcpipe.partitioner.problem.stage_graph import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionNetwork:
    """Options in the order of the node before them; nodes from the model's end, 0, to its start, the last.

    The options leaving node n are `leaving[n]` .. `leaving[n + 1]` − 1; those entering it are `by_after[entering[n]]`
    .. `by_after[entering[n + 1] − 1]`. `number[o]` is the option's place among the options that the field was made of.
    """

    options: Options
    number: IntArray
    start: int
    setting: Setting
    leaving: IntArray
    entering: IntArray
    by_after: IntArray

    @staticmethod
    def of(options: Options, setting: Setting, *, start: int) -> "OptionNetwork":
        """The field of all `options` of the stage graph whose start is the node `start`."""
        return _field(options, np.arange(len(options)), setting, start)

    def keep(self, which: BoolArray) -> "OptionNetwork":
        """The field of some of its options."""
        return _field(self.options.take(which), self.number[which], self.setting, self.start)

    def __len__(self) -> int:
        return len(self.options)

    @property
    def repeats(self) -> int:
        """How often the slowest lane is waited for after the pipeline has filled."""
        return self.setting.micro_batches_each - 1

    @property
    def lane_s(self) -> Array:
        """Each option's slowest lanes forward and backward."""
        return self.options.forward_lane_s + self.options.backward_lane_s

    @property
    def time_s(self) -> Array:
        """Each option's lanes forward and backward, one after the other."""
        return self.options.forward_sum_s + self.options.backward_sum_s

    @property
    def closing_s(self) -> Array:
        """Each option's seconds backward and, for a first stage, in synchronisation, with which an iteration closes."""
        first = self.options.before == self.start
        return self.options.backward_sum_s + np.where(first, self.options.sync_s, 0.0)


def _field(options: Options, number: IntArray, setting: Setting, start: int) -> OptionNetwork:
    order = np.argsort(options.before, kind="stable")
    options, number = options.take(order), number[order]
    ends = np.array([0, start])
    nodes, places = np.unique(np.concatenate([ends, options.before, options.after]), return_inverse=True)
    before, after = places[2 : 2 + len(order)], places[2 + len(order) :]
    options = options.at(before=before, after=after)
    by_after = np.argsort(after, kind="stable")
    steps = np.arange(len(nodes) + 1)
    return OptionNetwork(
        options=options,
        number=number,
        start=len(nodes) - 1,
        setting=setting,
        leaving=np.searchsorted(before, steps),
        entering=np.searchsorted(after[by_after], steps),
        by_after=by_after,
    )


def without_dominated(options: Options) -> Options:
    """Without options that another one for the same layers equals or beats in every respect."""
    names = ("forward_sum_s", "forward_lane_s", "backward_sum_s", "backward_lane_s", "round_s", "sync_s", "price_usd_s")
    columns = np.stack([*(getattr(options, name) for name in names), options.work_s, -options.most_behind])
    count = len(options)
    kept = np.ones(count, dtype=bool)
    for apart in range(1, int(np.bincount(options.edge).max(initial=1))):
        small, large = slice(0, count - apart), slice(apart, count)
        same = options.edge[small] == options.edge[large]
        larger_loses = same & (columns[:, small] <= columns[:, large]).all(axis=0)
        smaller_loses = same & (columns[:, large] <= columns[:, small]).all(axis=0) & ~larger_loses
        kept[large] &= ~larger_loses
        kept[small] &= ~smaller_loses
    return options.take(kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What paths take: seconds of an iteration, dollars for each of them and for requests; an element for each path.

    `stages` are how many, and `fits` says whether all fit their functions with as many stages behind them.
    """

    stages: IntArray
    fits: BoolArray
    iteration_s: Array
    price_usd_s: Array
    request_usd: Array

    @property
    def cost_usd(self) -> Array:
        """Dollars of an iteration."""
        return self.price_usd_s * self.iteration_s + self.request_usd


def total(field: OptionNetwork, paths: IntArray) -> Totals:
    """What `paths` take: a column for each, its options from the first stage to the last, then −1."""
    options, count = field.options, paths.shape[1]
    forward, forward_lane, backward, backward_lane, finish, price, request, work = np.zeros((8, count))
    shares = round_shares(field.setting, len(paths))[::-1]
    stages, fits = np.zeros(count, dtype=np.int64), np.ones(count, dtype=bool)
    for chosen in paths[::-1]:
        here = chosen >= 0
        fits &= ~here | (stages <= options.most_behind[chosen])
        pace = (forward + backward + options.round_s[chosen]) * shares[stages]
        pace = np.maximum(pace, options.forward_lane_s[chosen])
        stages += here
        forward += np.where(here, options.forward_sum_s[chosen], 0.0)
        backward += np.where(here, options.backward_sum_s[chosen], 0.0)
        forward_lane = np.maximum(forward_lane, np.where(here, pace, 0.0))
        backward_lane = np.maximum(backward_lane, np.where(here, options.backward_lane_s[chosen], 0.0))
        ends = backward + field.repeats * backward_lane + options.sync_s[chosen]
        finish = np.maximum(finish, np.where(here, ends, 0.0))
        price += np.where(here, options.price_usd_s[chosen], 0.0)
        request += np.where(here, options.request_usd[chosen], 0.0)
        work += np.where(here, options.work_s[chosen], 0.0)
    iteration_s = forward + field.repeats * forward_lane + finish
    cores = field.setting.spec.shared_cores
    if cores is not None:
        iteration_s = np.maximum(iteration_s, work / cores)
    return Totals(stages=stages, fits=fits, iteration_s=iteration_s, price_usd_s=price, request_usd=request)
