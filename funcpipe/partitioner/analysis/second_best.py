"""The second-best plan: the best of all plans except one."""

from collections.abc import Iterator, Sequence

import numpy as np

from funcpipe.core import Plan
from funcpipe.partitioner.cost import BoolArray
from funcpipe.partitioner.cost.loads import Setting
from funcpipe.partitioner.problem.options import Options
from funcpipe.partitioner.problem.problem import Problem, StageChoice
from funcpipe.partitioner.problem.stage_graph import StageGraph
from funcpipe.partitioner.search.incumbents import incumbents_for
from funcpipe.partitioner.search.search import Search
from funcpipe.partitioner.search.spaces import Space, spaces


def second_best(problem: Problem, plan: Plan) -> Plan | None:
    """The best plan other than `plan`, exactly; None if there is no other.

    Any other plan either has another setting, or begins with the first stages of `plan`, however many, and continues
    with a different one. All these sets of plans are searched together.
    """
    search = Search(problem, incumbents_for(problem.goal), among=_others(problem, plan))
    search.run()
    return search.found[-1].plan(problem) if search.found else None


def choices_of(problem: Problem, plan: Plan) -> list[StageChoice]:
    """The stages of `plan` as choices."""
    names = [size.name for size in problem.spec.sizes]
    return [StageChoice(stage.first, stage.stop, names.index(stage.size), stage.recompute) for stage in plan.stages]


def _others(problem: Problem, plan: Plan) -> Iterator[Space]:
    graph = problem.stage_graph
    choices = choices_of(problem, plan)

    def same(setting: Setting) -> bool:
        return (setting.replicas, setting.schedule) == (plan.replicas, plan.schedule)

    def other_setting(setting: Setting, options: Options) -> BoolArray:
        return np.full(len(options), not same(setting))

    yield from spaces(problem, graph, other_setting)
    for alike in range(len(choices)):

        def other_stage(setting: Setting, options: Options, alike: int = alike) -> BoolArray:
            if not same(setting):
                return np.zeros(len(options), dtype=bool)
            return _branches_off(graph, options, choices[: alike + 1])

        yield from spaces(problem, graph, other_stage)


def _branches_off(graph: StageGraph, options: Options, choices: Sequence[StageChoice]) -> BoolArray:
    """The options of plans that begin with all of `choices` except the last one, and continue with another stage."""
    first = graph.first[options.edge]
    *alike, other = choices
    kept: BoolArray = first > other.first
    kept |= (first == other.first) & ~_is(graph, options, other)
    for choice in alike:
        kept |= _is(graph, options, choice)
    return kept


def _is(graph: StageGraph, options: Options, choice: StageChoice) -> BoolArray:
    same_layers = (graph.first[options.edge] == choice.first) & (graph.stop[options.edge] == choice.stop)
    result: BoolArray = same_layers & (options.size == choice.size) & (options.recompute == choice.recompute)
    return result
