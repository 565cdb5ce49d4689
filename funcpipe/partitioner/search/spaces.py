"""The spaces that are searched: for each setting, the network of all stages that plans under it may have.

A setting fixes replicas and schedule, so within a space every option has constant costs, but for the way in which its
replicas synchronise. By hand: a global batch of 4 micro-batches can have 1, 2 or 4 replicas; with three schedules (for
4 replicas, one micro-batch each, there is no order to choose) these are 3 + 3 + 1 = 7 spaces.

Two things depend on how many stages a plan has, which an option does not know:

- where functions share a store, the bandwidth of each, or the requests of an account. A space first prices plans as if
  they had the fewest stages that they may have, which is a lower bound; where that is not enough, it is split, down to
  one number of stages;
- under 1F1B, the memory of a stage and its pace depend on how many stages lie *behind* it. A space first treats every
  stage as if few lay behind it, which is a lower bound; `with_stage_counts` later multiplies the nodes by that number.
  Until then 1F1B and eager 1F1B cost the same, so they share one space and its first look: stages hold fewer
  micro-batches under 1F1B, which therefore has all options that eager 1F1B has. A window that may hold a plan is split.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from funcpipe.core import ScheduleKind
from funcpipe.core.cached import cached_property
from funcpipe.partitioner.cost import BoolArray, IntArray
from funcpipe.partitioner.cost.loads import Loads, Setting
from funcpipe.partitioner.cost.sync_ways import WayTable, way_table
from funcpipe.partitioner.problem.options import Options, price_options, ways
from funcpipe.partitioner.problem.problem import Problem, StageChoice
from funcpipe.partitioner.problem.stage_graph import StageGraph
from funcpipe.partitioner.search.option_network import OptionNetwork, PathCosts, without_dominated


@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """Plans of `fewest` to `most` stages under one setting.

    Where `counts_stages` is false, paths through `network` may have fewer or more stages, and stages on them may not
    fit with all that lie behind them. Plans of more than `exact_upto` stages cost more than the network says: they are
    searched in `parts`, and take at most `slowdown` times as long. With `by_schedule` the parts are schedules, and
    plans are those of the first one until a window is split.
    """

    setting: Setting
    graph: StageGraph
    options: Options
    network: OptionNetwork
    fewest: int
    most: int
    counts_stages: bool
    exact_upto: int
    slowdown: float = 1.0
    split: "Callable[[], tuple[Space, ...]] | None" = None
    by_schedule: bool = False

    @cached_property
    def parts(self) -> "tuple[Space, ...]":
        """Smaller spaces that hold the same plans, with better bounds; none if the costs are those of all plans."""
        return self.split() if self.split is not None else ()

    def within(self, network: OptionNetwork, whole: "Space") -> OptionNetwork:
        """The options of this part that may be needed if of those of the `whole` only `network` is.

        For each option of a part the whole has the same one, or one for the same layers that costs no more.
        """
        if self.options is whole.options:
            return network

        def keys(options: Options) -> IntArray:
            return 2 * (options.edge * len(self.setting.spec.sizes) + options.size) + options.recompute

        own, left = self.network.options, network.options
        elsewhere = ~np.isin(keys(own), keys(whole.options)) & np.isin(own.edge, left.edge)
        return self.network.keep(elsewhere | np.isin(keys(own), keys(left)))

    def choices(self, network: OptionNetwork, path: IntArray, ways: IntArray) -> list[StageChoice]:
        """The stages of a path through `network`, which is a part of this space's, in these ways."""
        return [
            self.options.choice(int(network.number[option]), int(way), self.graph)
            for option, way in zip(path, ways, strict=True)
            if option >= 0
        ]

    def admits(self, paths: PathCosts) -> BoolArray:
        """Which paths are plans of this space that cost what they are said to."""
        return paths.fits & (paths.stages >= self.fewest) & (paths.stages <= min(self.most, self.exact_upto))


_COUNTED = 300_000
"""How many options a network may have, times the most stages of a plan, to count the stages of its paths at once."""

Keep = Callable[[Setting, Options], BoolArray]
Tables = dict[tuple[object, ...], WayTable]
"""Ways of synchronising by what they depend on, to be used again in a search of the same stages."""


def all_spaces(problem: Problem) -> Iterator[Space]:
    """Every space of `problem`."""
    return spaces(problem, problem.stage_graph)


def exact_spaces(among: Iterable[Space]) -> Iterator[Space]:
    """The same plans in spaces whose networks cost what plans do, one for each number of stages where they must be."""
    for space in among:
        if space.split is None:
            yield space
        else:
            yield from exact_spaces(space.parts)


def spaces(
    problem: Problem,
    graph: StageGraph,
    keep: Keep | None = None,
    settings: Iterable[Setting] | None = None,
    tables: Tables | None = None,
) -> Iterator[Space]:
    """Every space of `problem` with the options for which `keep` is true (None: all), made one by one.

    The spaces are those of all settings of the problem unless others are given.
    """
    made = _Maker(
        problem=problem,
        graph=graph,
        keep=keep,
        loads=ways(problem, graph),
        tables={} if tables is None else tables,
    )
    links = [max(size.upload_bytes_s, size.download_bytes_s) for size in problem.spec.sizes]
    cap = problem.shared_bytes_s
    for group in _sharing_a_first_look(problem.settings() if settings is None else settings):
        most = min(graph.layers, problem.max_functions // group[0].replicas)
        free = most if cap is None else min(most, int(cap / max(links) / group[0].replicas))
        if any(store.requests_s is not None for store in (group[0].message_store, group[0].sum_store)):
            free = 1  # all functions share the requests of an account
        if keep is None and most <= free:
            yield from made.together(group, most)
        else:
            for setting in group:
                yield from made.spaces(setting, 1, most, exact_upto=max(free, 1))


def _sharing_a_first_look(settings: Iterable[Setting]) -> Iterator[list[Setting]]:
    """The settings in groups: those that follow each other and differ only between 1F1B and eager 1F1B."""
    group: list[Setting] = []
    for setting in settings:
        in_turn = bool(group) and group[-1].schedule is ScheduleKind.ONE_F_ONE_B
        if not (in_turn and setting == replace(group[-1], schedule=ScheduleKind.EAGER_ONE_F_ONE_B)):
            if group:
                yield group
            group = []
        group.append(setting)
    if group:
        yield group


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """Makes the spaces of one problem."""

    problem: Problem
    graph: StageGraph
    keep: Keep | None
    loads: tuple[Loads, ...]
    tables: Tables

    def spaces(self, setting: Setting, fewest: int, most: int, *, exact_upto: int) -> Iterator[Space]:
        """Plans of `fewest` to `most` stages, priced as if they had `exact_upto`; nothing if there is no such plan."""
        if fewest > most:
            return
        problem, graph, workers = self.problem, self.graph, exact_upto * setting.replicas
        options = price_options(
            problem, graph, self.loads, setting, workers=workers, ways=self._table(setting, workers)
        )
        if self.keep is not None:
            options = options.take(self.keep(setting, options))
        options = without_dominated(options)
        if not len(options):
            return
        space = Space(
            setting=setting,
            graph=graph,
            options=options,
            network=OptionNetwork.of(options, setting, start=graph.start),
            fewest=fewest,
            most=most,
            counts_stages=setting.schedule is ScheduleKind.GPIPE and fewest == 1 and most == graph.layers,
            exact_upto=exact_upto,
        )
        if most <= exact_upto:
            yield _counted(space) if fewest > 1 else space
        else:
            slowdown = 2 * most / exact_upto  # of transfers, and of sums that a backward hid
            yield replace(space, slowdown=slowdown, counts_stages=False, split=lambda: tuple(self._parts(space)))

    def together(self, group: Sequence[Setting], most: int) -> Iterator[Space]:
        """The plans of settings that differ in memory and pace alone, as one space until stages are counted.

        Under the first setting stages hold the fewest micro-batches, so it has an option for the same layers that is no
        dearer than any of another setting; under the last one they hold most, so its pace is the fastest.
        """
        first, *others = group
        for space in self.spaces(first, 1, most, exact_upto=most):

            def split(space: Space = space) -> tuple[Space, ...]:
                return (space, *(part for other in others for part in self.spaces(other, 1, most, exact_upto=most)))

            yield replace(space, by_schedule=True, split=split) if others else space

    def _parts(self, space: Space) -> Iterator[Space]:
        """The plans that cost what the space says, and two halves of the others."""
        setting, upto = space.setting, space.exact_upto
        yield _counted(replace(space, most=upto, counts_stages=False))
        middle = (upto + 1 + space.most) // 2
        yield from self.spaces(setting, upto + 1, middle, exact_upto=upto + 1)
        yield from self.spaces(setting, middle + 1, space.most, exact_upto=middle + 1)

    def _table(self, setting: Setting, workers: int) -> WayTable:
        way = None if setting.sync is None else setting.way
        shared = setting.sum_store.shared_bytes_s is not None or setting.sum_store.requests_s is not None
        key = setting.replicas, way, workers if shared else 0, setting.stores.sums
        if key not in self.tables:
            self.tables[key] = way_table(self.loads[0], setting, workers=workers)
        return self.tables[key]


def _counted(space: Space) -> Space:
    """The same plans, in a network that has no others, if that is not too large."""
    if len(space.network) * space.most > _COUNTED:
        return space
    return replace(space, network=with_stage_counts(space, space.network), counts_stages=True)


def with_stage_counts(space: Space, network: OptionNetwork) -> OptionNetwork:
    """`network` with each node multiplied by the number of stages behind it, up to `space.most`.

    Node n with b stages behind it becomes n · (most + 1) + b, the start remains a single node, and an option leads from
    b + 1 stages to b. Left out are options that do not fit with b stages behind them, and paths with a number of
    stages that the space does not admit.
    """
    stages = np.arange(space.most)
    options = network.options
    repeated = np.repeat(np.arange(len(options)), len(stages))
    behind = np.tile(stages, len(options))
    wide = space.most + 1
    before, after = options.before[repeated], options.after[repeated]
    at_start = before == network.start
    possible = ((after > 0) | (behind == 0)) & (~at_start | (behind + 1 >= space.fewest))
    possible &= behind <= options.most_behind[repeated]
    start = network.start * wide
    share = network.setting.round_shares(space.most)[::-1][behind]
    taken = options.take(repeated)
    taken = replace(
        taken,
        before=np.where(at_start, start, before * wide + behind + 1),
        after=after * wide + behind,
        costs=taken.costs._replace(share=share),
    )
    multiplied = OptionNetwork.of(taken.take(possible), network.setting, start=start)
    return replace(multiplied, number=network.number[repeated[possible]][multiplied.number])
