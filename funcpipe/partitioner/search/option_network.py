"""The options of one setting as a network: which stage can follow which, laid out for computing along paths.

A plan is a path from the node `start` (before the first layer) to node 0 (behind the last one), and each option on it
is one stage. Options are sorted by the node before them, so those that leave a node are one slice; those that enter a
node are a slice of `by_after`. Nodes are numbered from the model's end: an option always leads to a smaller number.

By hand, for a chain of 2 layers and one size: node 2 is the start, node 1 lies between the layers, node 0 is the end.

    option   stage     before → after
    0        [1, 2)    1 → 0
    1        [0, 1)    2 → 1
    2        [0, 2)    2 → 0

`leaving` is [0, 0, 1, 3]: option 0 leaves node 1, options 1 and 2 leave node 2. The plan of two stages is the path
(1, 0), the plan of one stage the path (2). Paths are stored as columns, from the first stage down, filled up with −1:

    [[ 1,  2],
     [ 0, −1]]

A complete path gets its ways of synchronising at last. An iteration ends with the synchronisation of some stage in some
way. So it is enough to try these ends: for each, every other stage takes the way with the fewest requests that is in
time. By hand: of two stages the first may end after 9 or 7 s, the second after 8 or 6 s, the faster way for more
dollars. Four ends: with 9 s both take the cheap way, with 8 s the first takes the fast one, with 7 s both do, and 6 s
cannot be.
"""

from dataclasses import dataclass, replace

import numpy as np

from funcpipe.partitioner.cost import Array, BoolArray, IntArray
from funcpipe.partitioner.cost.loads import Setting
from funcpipe.partitioner.cost.pipeline import PlanCosts, PlanTail, StageCosts, synchronised_s, with_stage
from funcpipe.partitioner.problem.options import Options

_WAYS_PRICED = 60_000
"""Of how many options times ways the best way is worked out for a window, rather than bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionNetwork:
    """Options in the order of the node before them, which may be some of a larger network.

    The options leaving node n are `leaving[n]` .. `leaving[n + 1]` − 1; those entering it are `by_after[entering[n]]`
    .. `by_after[entering[n + 1] − 1]`. `number[o]` is the place of option o among those of the space.
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
        """The network of all `options` of a stage graph whose start is the node `start`."""
        return _network(options, np.arange(len(options)), setting, start)

    def keep(self, which: BoolArray) -> "OptionNetwork":
        """The network of some of its options; nodes that none of them touches vanish."""
        return _network(self.options.take(which), self.number[which], self.setting, self.start)

    def __len__(self) -> int:
        return len(self.options)

    @property
    def costs(self) -> StageCosts:
        """The costs of each option."""
        return self.options.costs

    @property
    def repeats(self) -> int:
        """How many micro-batches follow the first one at the pace of the slowest lane."""
        return self.setting.repeats

    @property
    def meeting_repeats(self) -> float:
        """The same before a synchronisation: `Setting.meeting_repeats`."""
        return self.setting.meeting_repeats

    @property
    def pass_s(self) -> Array:
        """Each option's lanes of both passes, one after the other."""
        return self.costs.forward_sum_s + self.costs.backward_sum_s

    @property
    def is_first(self) -> BoolArray:
        """Which options are first stages."""
        first: BoolArray = self.options.before == self.start
        return first

    @property
    def closing_s(self) -> Array:
        """Each option's backward and, for a first stage, its synchronisation: an iteration ends after all of these."""
        return self.costs.backward_sum_s + np.where(self.is_first, self.costs.sync_s, 0.0)

    def sync_usd(self, second_usd: Array | float) -> Array:
        """The least that each option's synchronisation costs beyond the requests of way `fewest`, a second at a price.

        For many options, the seconds of the fastest way alone, which is less.
        """
        options, seconds = self.options, self.options.ways.seconds
        if len(options) * seconds.shape[1] > _WAYS_PRICED:
            least: Array = second_usd * options.costs.sync_s
            return least
        price_usd = np.broadcast_to(second_usd, len(options))[:, None]
        usd = options.ways.usd_rows(options.row) - options.ways.usd_of(options.row, options.fewest)[:, None]
        usd = usd + price_usd * seconds[options.row]
        usd[np.arange(seconds.shape[1]) < options.fewest[:, None]] = np.inf
        found: Array = usd.min(axis=1)
        return found

    def needing(self, fewest: IntArray) -> "OptionNetwork":
        """The network if each option needs at least the way `fewest`."""
        return replace(self, options=self.options.needing(fewest))

    @property
    def closed_s(self) -> Array:
        """Each option's part of an iteration that ends with the first stage's synchronisation, slowest lanes aside."""
        return self.costs.forward_sum_s + self.closing_s


def _network(options: Options, number: IntArray, setting: Setting, start: int) -> OptionNetwork:
    order = np.argsort(options.before, kind="stable")
    options, number = options.take(order), number[order]
    ends = np.array([0, start])
    nodes, places = np.unique(np.concatenate([ends, options.before, options.after]), return_inverse=True)
    before, after = places[2 : 2 + len(order)], places[2 + len(order) :]
    by_after = np.argsort(after, kind="stable")
    steps = np.arange(len(nodes) + 1)
    return OptionNetwork(
        options=replace(options, before=before, after=after),
        number=number,
        start=len(nodes) - 1,
        setting=setting,
        leaving=np.searchsorted(before, steps),
        entering=np.searchsorted(after[by_after], steps),
        by_after=by_after,
    )


def without_dominated(options: Options) -> Options:
    """The options without those that another one for the same layers equals or beats in every respect.

    Options are sorted by edge, so that candidates for a comparison are neighbours at most as far apart as one edge has
    options.
    """
    costs, seconds = options.costs, options.ways.seconds
    compared = np.stack(
        [
            *(costs.forward_sum_s, costs.forward_lane_s, costs.backward_sum_s, costs.backward_lane_s, costs.round_s),
            *(costs.request_usd, costs.price_usd_s, costs.work_s, -options.most_behind),
        ]
    )
    count = len(options)
    kept = np.ones(count, dtype=bool)
    for apart in range(1, int(np.bincount(options.edge).max(initial=1))):
        small, large = slice(0, count - apart), slice(apart, count)
        same = options.edge[small] == options.edge[large]
        larger_loses = same & (compared[:, small] <= compared[:, large]).all(axis=0)
        _only_faster(larger_loses, seconds, options.row[small], options.row[large])
        smaller_loses = same & (compared[:, large] <= compared[:, small]).all(axis=0) & ~larger_loses
        _only_faster(smaller_loses, seconds, options.row[large], options.row[small])
        kept[large] &= ~larger_loses
        kept[small] &= ~smaller_loses
    return options.take(kept)


def _only_faster(loses: BoolArray, seconds: Array, winners: IntArray, losers: IntArray) -> None:
    """Clear `loses` where the winner synchronises slower in some way than the loser."""
    which = np.flatnonzero(loses)
    loses[which] = (seconds[winners[which]] <= seconds[losers[which]]).all(axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PathCosts:
    """The costs of paths; an element for each path.

    `stages` counts their stages; `fits` says whether all of them fit with as many stages behind them as there are.
    """

    stages: IntArray
    fits: BoolArray
    plan: PlanCosts


def path_costs(network: OptionNetwork, paths: IntArray, ways: IntArray) -> PathCosts:
    """Price `paths`: a column of options for each, from the first stage to the last, then −1; and their ways."""
    options, table = network.options, network.options.ways
    shares = network.setting.round_shares(len(paths))[::-1]
    stages, fits = np.zeros(paths.shape[1], dtype=np.int64), np.ones(paths.shape[1], dtype=bool)
    tail = PlanTail.empty(paths.shape[1])
    for chosen, way in zip(paths[::-1], ways[::-1], strict=True):
        here = chosen >= 0
        fits &= ~here | (stages <= options.most_behind[chosen])
        row = options.row[chosen]
        more_usd = table.usd_of(row, way) - table.usd_of(row, options.fewest[chosen])
        stage = StageCosts(*(column[chosen] for column in options.costs))._replace(
            share=shares[stages],
            sync_s=table.seconds[row, way],
            request_usd=options.costs.request_usd[chosen] + more_usd,
        )
        longer = with_stage(tail, stage, repeats=network.meeting_repeats)
        tail = PlanTail(*(np.where(here, new, old) for new, old in zip(longer, tail, strict=True)))
        stages = stages + here
    plan = PlanCosts(
        iteration_s=tail.iteration_s(
            repeats=network.repeats,
            seconds_per_work=network.setting.seconds_per_work,
            loading_s=network.setting.loading_s,
            local_repeats=network.setting.local_repeats,
        ),
        price_usd_s=tail.price_usd_s,
        request_usd=tail.request_usd,
    )
    return PathCosts(stages=stages, fits=fits, plan=plan)


_FEW_ENDS = 8
"""The number of ends that are tried for the paths of a first look."""
_IN_TIME = 1e-12


def all_ends(network: OptionNetwork, paths: IntArray) -> tuple[IntArray, IntArray]:
    """The `paths` (columns of options, then −1), repeated for all ends that may be best; and the way of each option."""
    begun_s, seconds = _ways_of(network, paths)
    here = paths >= 0
    earliest_s = np.where(here, begun_s + seconds[..., -1], -np.inf).max(axis=0)
    ends_s = (begun_s[..., None] + seconds).transpose(1, 0, 2)
    wanted = here.T[..., None] & (ends_s >= earliest_s[:, None, None] * (1 - _IN_TIME))
    path = np.nonzero(wanted)[0]
    return _in_time(paths[:, path], begun_s[:, path], seconds[:, path], ends_s[wanted])


def few_ends(network: OptionNetwork, paths: IntArray) -> tuple[IntArray, IntArray]:
    """The same for some ends between the earliest there is and that of the fewest requests."""
    begun_s, seconds = _ways_of(network, paths)
    here = paths >= 0
    first_s, last_s = (np.where(here, begun_s + seconds[..., way], -np.inf).max(axis=0) for way in (-1, 0))
    shares = np.linspace(0.0, 1.0, _FEW_ENDS if seconds.shape[-1] > 1 else 1)
    ends_s = (first_s + shares[:, None] * (last_s - first_s)).ravel()
    path = np.tile(np.arange(paths.shape[1]), len(shares))
    return _in_time(paths[:, path], begun_s[:, path], seconds[:, path], ends_s)


def _in_time(paths: IntArray, begun_s: Array, seconds: Array, ends_s: Array) -> tuple[IntArray, IntArray]:
    """The paths, and for each option the way with the fewest requests that ends by `ends_s`, or the fastest."""
    limit_s = ends_s * (1 + _IN_TIME) - begun_s
    late = (seconds > limit_s[..., None]).sum(axis=-1)
    return paths, np.minimum(late, seconds.shape[-1] - 1)


def _ways_of(network: OptionNetwork, paths: IntArray) -> tuple[Array, Array]:
    """For each option on the paths when it begins to synchronise, counted from the end of the forwards, and the seconds
    of its ways.
    """
    return _begun_s(network, paths), network.options.ways.seconds[network.options.row[paths]]


def _begun_s(network: OptionNetwork, paths: IntArray) -> Array:
    options, repeats = network.options, network.meeting_repeats
    begun_s, tail = np.zeros(paths.shape), PlanTail.empty(paths.shape[1])
    for place in reversed(range(len(paths))):
        chosen = paths[place]
        stage = StageCosts(*(column[chosen] for column in options.costs))
        longer = with_stage(tail, stage, repeats=repeats)
        tail = PlanTail(*(np.where(chosen >= 0, new, old) for new, old in zip(longer, tail, strict=True)))
        begun_s[place] = synchronised_s(tail.backward_s, tail.backward_lane_s, 0.0, repeats)
    return begun_s
