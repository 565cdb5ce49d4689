"""The settings of a problem, each with the stages that may be chosen under it: the spaces that are searched."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from funcpipe.core import ScheduleKind
from funcpipe.partitioner.cost.formulas import Setting, round_shares
from funcpipe.partitioner.problem.options import BoolArray, Options, price_options, ways
from funcpipe.partitioner.problem.problem import Choice, Problem
from funcpipe.partitioner.problem.stage_graph import IntArray, StageGraph
from funcpipe.partitioner.search.option_network import OptionNetwork, without_dominated


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Plans of `fewest` to `most` stages under one setting.

    While `counted` is false, `field` may admit paths of fewer or more stages, and stages that do not fit with all that
    lie behind them.
    """

    setting: Setting
    graph: StageGraph
    options: Options
    field: OptionNetwork
    fewest: int
    most: int
    counted: bool

    def choices(self, field: OptionNetwork, path: IntArray) -> list[Choice]:
        """The stages that a path through `field`, a part of this space's, stands for."""
        return [self.options.choice(int(field.number[option]), self.graph) for option in path if option >= 0]


Keep = Callable[[Setting, Options], BoolArray]


def spaces(problem: Problem, graph: StageGraph, keep: Keep | None = None) -> Iterator[Space]:
    """Every space of `problem`, with the options that `keep` lets pass (None: all).

    Where functions share the platform's links, plans of another number of stages are another space.
    """
    links = [max(size.upload_bytes_s, size.download_bytes_s) for size in problem.spec.sizes]
    loads = ways(problem, graph)
    for setting in problem.settings():
        most = min(graph.layers, problem.max_functions // setting.replicas)
        cap = problem.spec.shared_bytes_s
        free = most if cap is None else min(most, int(cap / max(links) / setting.replicas))
        ranges = [(1, free)] if free else []
        for fewest, upto in [*ranges, *((count, count) for count in range(free + 1, most + 1))]:
            options = price_options(problem, graph, loads, setting, workers=upto * setting.replicas)
            if keep is not None:
                options = options.take(keep(setting, options))
            options = without_dominated(options)
            if len(options):
                yield Space(
                    setting=setting,
                    graph=graph,
                    options=options,
                    field=OptionNetwork.of(options, setting, start=graph.start),
                    fewest=fewest,
                    most=upto,
                    counted=setting.schedule is ScheduleKind.GPIPE and fewest == 1 and upto == graph.layers,
                )


def counted(space: Space, field: OptionNetwork) -> OptionNetwork:
    """`field` with as many stages as `space` admits: its nodes know how many stages lie behind them, and its options
    are those that fit with so many.
    """
    stages = np.arange(space.most)
    options = field.options
    repeated = np.repeat(np.arange(len(options)), len(stages))
    behind = np.tile(stages, len(options))
    wide = space.most + 1
    before, after = options.before[repeated], options.after[repeated]
    at_start = before == field.start
    possible = ((after > 0) | (behind == 0)) & (~at_start | (behind + 1 >= space.fewest))
    possible &= behind <= options.most_behind[repeated]
    start = field.start * wide
    nodes_before = np.where(at_start, start, before * wide + behind + 1)
    share = round_shares(field.setting, space.most)[::-1][behind]
    parts = options.take(repeated).at(before=nodes_before, after=after * wide + behind, share=share).take(possible)
    fresh = OptionNetwork.of(parts, field.setting, start=start)
    return OptionNetwork(
        options=fresh.options,
        number=field.number[repeated[possible]][fresh.number],
        start=fresh.start,
        setting=fresh.setting,
        leaving=fresh.leaving,
        entering=fresh.entering,
        by_after=fresh.by_after,
    )
