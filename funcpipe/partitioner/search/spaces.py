"""The spaces that are searched: for each setting, the network of all stages that plans under it may have.

A setting fixes replicas and schedule, so within a space every option has constant costs, but for the way in which its
replicas synchronise. By hand: a global batch of 4 micro-batches can have 1, 2 or 4 replicas; with three schedules (for
4 replicas, one micro-batch each, there is no order to choose) these are 3 + 3 + 1 = 7 spaces.

Two things depend on how many stages a plan has, which an option does not know:

- where functions share the platform's links, the bandwidth of each: such plans form a space for each number of stages;
- under 1F1B, the memory of a stage and its pace depend on how many stages lie *behind* it. A space first treats every
  stage as if few lay behind it, which is a lower bound; `with_stage_counts` later multiplies the nodes by that number.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from funcpipe.core import ScheduleKind, SyncWay
from funcpipe.partitioner.cost.arrays import BoolArray, IntArray
from funcpipe.partitioner.cost.loads import Setting
from funcpipe.partitioner.cost.sync_ways import WayTable, way_table
from funcpipe.partitioner.problem.options import Options, price_options, ways
from funcpipe.partitioner.problem.problem import Problem, StageChoice
from funcpipe.partitioner.problem.stage_graph import StageGraph
from funcpipe.partitioner.search.option_network import OptionNetwork, PathCosts, without_dominated


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Plans of `fewest` to `most` stages under one setting.

    Where `counts_stages` is false, paths through `network` may have fewer or more stages, and stages on them may not
    fit with all that lie behind them.
    """

    setting: Setting
    graph: StageGraph
    options: Options
    network: OptionNetwork
    fewest: int
    most: int
    counts_stages: bool

    def choices(self, network: OptionNetwork, path: IntArray, ways: IntArray) -> list[StageChoice]:
        """The stages of a path through `network`, which is a part of this space's, in these ways."""
        return [
            self.options.choice(int(network.number[option]), int(way), self.graph)
            for option, way in zip(path, ways, strict=True)
            if option >= 0
        ]

    def admits(self, paths: PathCosts) -> BoolArray:
        """Which paths are plans of this space."""
        return paths.fits & (paths.stages >= self.fewest) & (paths.stages <= self.most)


Keep = Callable[[Setting, Options], BoolArray]


def all_spaces(problem: Problem) -> Iterator[Space]:
    """Every space of `problem`."""
    return spaces(problem, problem.stage_graph)


def spaces(
    problem: Problem, graph: StageGraph, keep: Keep | None = None, settings: Iterable[Setting] | None = None
) -> Iterator[Space]:
    """Every space of `problem` with the options for which `keep` is true (None: all), made one by one.

    The spaces are those of all settings of the problem unless others are given.
    """
    links = [max(size.upload_bytes_s, size.download_bytes_s) for size in problem.spec.sizes]
    loads = ways(problem, graph)
    tables: dict[tuple[int, SyncWay | None, int], WayTable] = {}
    for setting in problem.settings() if settings is None else settings:
        most = min(graph.layers, problem.max_functions // setting.replicas)
        cap = problem.spec.shared_bytes_s
        free = most if cap is None else min(most, int(cap / max(links) / setting.replicas))
        ranges = [(1, free)] if free else []
        for fewest, upto in [*ranges, *((count, count) for count in range(free + 1, most + 1))]:
            workers = upto * setting.replicas
            key = setting.replicas, None if setting.sync is None else setting.way, workers if cap else 0
            if key not in tables:
                tables[key] = way_table(loads[0], setting, workers=workers)
            options = price_options(problem, graph, loads, setting, workers=workers, ways=tables[key])
            if keep is not None:
                options = options.take(keep(setting, options))
            options = without_dominated(options)
            if len(options):
                yield Space(
                    setting=setting,
                    graph=graph,
                    options=options,
                    network=OptionNetwork.of(options, setting, start=graph.start),
                    fewest=fewest,
                    most=upto,
                    counts_stages=setting.schedule is ScheduleKind.GPIPE and fewest == 1 and upto == graph.layers,
                )


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
