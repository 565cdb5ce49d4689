"""Make a problem small enough to search, when skip connections make its stage graph too large.

First, stages that fit no function are left out of the graph. If that is not enough, layers are merged further, until
the graph is small enough. What is merged must not cost much, nor make a plan impossible: the plans that are best and
fastest on the loose graph, which is small for any model, are found first, and their cuts are kept. As that graph tells
exactly what fits into memory, there is a plan among the cuts that remain if there is any. Of all pairs of stores that
plans may use, the graph is made for the one that takes the largest objects, so it serves the others too.

By hand: 30 layers, and a graph with more than 100,000 edges from layer 6 on. The best plan of the loose graph cuts
before layers 9 and 20. The layers are merged to 24, as many as lie behind the place where the edges ran out, with cuts
before 9 and 20; if the graph is still too large, to fewer. In the end the three stages of that plan are left, whose
graph is a single path.
"""

from collections.abc import Collection
from dataclasses import replace

from funcpipe.partitioner.problem.cuts import merge_layers
from funcpipe.partitioner.problem.goal import Goal
from funcpipe.partitioner.problem.options import fitting_stages
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.problem.stage_graph import TooEntangled
from funcpipe.partitioner.search.search import best_for
from funcpipe.partitioner.search.store_pairs import in_stores, roomiest

_SHRINK = 0.85
"""The share of layers that is left at most when the graph is too large."""


def disentangled(problem: Problem) -> Problem:
    """The problem itself, or one whose stage graph is small enough to search; its graph is made.

    The graph is the same for all stores that the training allows.
    """
    if _ways_left(problem) is None:
        return problem
    roomy = replace(problem, stores=roomiest(problem.spec, problem.training.stores))
    return in_stores(_small_enough(roomy), problem.stores)


def _small_enough(problem: Problem) -> Problem:
    problem = replace(problem, fitting=fitting_stages(problem))
    left = _ways_left(problem)
    plans = _loose_plans(problem) if left is not None else []
    keep = {layer for plan in plans for layer in plan}
    while left is not None:
        count = len(problem.profile.layers)
        merged = _merged(problem, min(max(left, count // 2), int(_SHRINK * count)), keep)
        if len(merged.profile.layers) == count:
            return _with_cuts(problem, plans[0]) if plans else merged
        problem = merged
        left = _ways_left(problem)
    return problem


def _ways_left(problem: Problem) -> int | None:
    """None if the stage graph is small enough, else how many layers at the model's end it was made for until then."""
    try:
        _ = problem.stage_graph
    except TooEntangled as error:
        return len(problem.profile.layers) - error.first
    return None


def _loose_plans(problem: Problem) -> list[tuple[str, ...]]:
    """The layers with which the stages of the best and of the fastest plan of the loose graph begin, by name."""
    goals = problem.goal, Goal(counts_seconds=True, deadline_s=problem.goal.deadline_s)
    plans = [best_for(problem, goal, graph=problem.loose_graph) for goal in goals]
    layers = problem.profile.layers
    return [tuple(layers[s.first].graph_layers[0] for s in plan.stages) for plan in plans if plan is not None]


def _merged(problem: Problem, limit: int, keep: Collection[str]) -> Problem:
    """The problem with at most `limit` layers, unless the pins and the layers `keep` ask for more."""
    layers = problem.profile.layers
    kept = {i for i, layer in enumerate(layers) if layer.graph_layers[0] in keep} | problem.placed.kept
    smaller = replace(problem, profile=merge_layers(problem.profile, max(limit, 1), keep=kept), fitting=None)
    return replace(smaller, fitting=fitting_stages(smaller))


def _with_cuts(problem: Problem, cuts: Collection[str]) -> Problem:
    """The problem with a layer for each stage of a plan, and no other stages: its graph is a single path."""
    merged = _merged(problem, 1, cuts)
    layers = range(len(merged.profile.layers))
    return replace(merged, fitting=frozenset((layer, layer + 1) for layer in layers))
