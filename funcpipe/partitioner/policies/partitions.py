"""Policies that cut the model but do not choose everything together: uniform, after TPDMP, after PipeDream.

They choose among the settings that the exact search has, so none of their plans can be better than the best plan.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from funcpipe.core import Plan
from funcpipe.partitioner.cost.arrays import Array, IntArray
from funcpipe.partitioner.cost.formulas import lane_times, sync_times
from funcpipe.partitioner.cost.loads import Setting
from funcpipe.partitioner.policies.common import Cuts, best_of, fitted
from funcpipe.partitioner.problem.goal import Goal
from funcpipe.partitioner.problem.options import edge_loads
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.problem.report import report
from funcpipe.partitioner.problem.stage_graph import StageGraph
from funcpipe.partitioner.search.search import best_for


def uniform(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """Stages with equal numbers of layers, one size for all: the best such plan."""
    started_s = time.monotonic()
    layers = len(problem.profile.layers)
    plans = (
        fitted(problem, setting, _even(layers, count), [size] * count)
        for setting in problem.one_way_settings()
        for count in range(1, layers + 1)
        for size in sorted(problem.placed.open_sizes)
    )
    best = best_of(problem, plans, policy="uniform")
    return report(best, problem, name="uniform", bound=None, solve_s=time.monotonic() - started_s)


def tpdmp(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """After TPDMP: for each function size the fastest plan on that size alone; of these the best.

    The partition is chosen for throughput; only the size, the same for all stages, is chosen for the goal.
    """
    started_s = time.monotonic()
    fastest = Goal(counts_seconds=True, deadline_s=problem.goal.deadline_s)
    pinned = set(problem.placed.sizes.values())
    plans = (
        best_for(_on_one_size(problem, size), fastest) for size in sorted(problem.placed.open_sizes) if pinned <= {size}
    )
    best = best_of(problem, plans, policy="tpdmp")
    return report(best, problem, name="tpdmp", bound=None, solve_s=time.monotonic() - started_s)


def _on_one_size(problem: Problem, size: int) -> Problem:
    """The problem with all layers pinned to one size; the platform stays, so that the settings stay the same."""
    names = {layer.name: problem.spec.sizes[size].name for layer in problem.profile.layers}
    return replace(problem, pins=replace(problem.pins, sizes=names))


def pipedream(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """PipeDream's dynamic programme (Narayanan et al., SOSP 2019): the slowest stage is as fast as possible.

    For each setting, function size and number of stages it finds the cuts that minimise the time of the slowest stage:
    of its computation, its transfers or, spread over the micro-batches, its synchronisation. Of all these plans the
    best is taken.
    """
    started_s = time.monotonic()
    graph = problem.stage_graph
    plans = (
        fitted(problem, setting, cuts, [size] * len(cuts))
        for setting in problem.one_way_settings()
        for size, cuts in _balanced(problem, graph, setting)
    )
    best = best_of(problem, plans, policy="pipedream")
    return report(best, problem, name="pipedream", bound=None, solve_s=time.monotonic() - started_s)


def _even(layers: int, count: int) -> Cuts:
    """`count` stages with equal numbers of layers, give or take one."""
    return list(itertools.pairwise(round(layers * i / count) for i in range(count + 1)))


def _balanced(problem: Problem, graph: StageGraph, setting: Setting) -> Iterator[tuple[int, Cuts]]:
    """For each size and number of stages the cuts with the least time of the slowest stage."""
    loads = edge_loads(problem, graph)
    lanes = lane_times(loads, setting, workers=setting.replicas)
    sync_s = sync_times(loads, setting, workers=setting.replicas) / setting.micro_batches_each
    busy = [
        lanes.forward_s + lanes.backward_s,
        lanes.forward_upload_s + lanes.backward_upload_s,
        lanes.forward_download_s + lanes.backward_download_s,
        sync_s,
    ]
    slowest_s = np.max(np.stack([np.broadcast_to(some, busy[0].shape) for some in busy]), axis=0)
    most = min(graph.layers, problem.max_functions // setting.replicas)
    for size in sorted(problem.placed.open_sizes):
        for cuts in _least_peaks(graph, slowest_s[:, size], most):
            yield size, cuts


def _least_peaks(graph: StageGraph, peak: Array, most: int) -> Iterator[Cuts]:
    """For each number of stages up to `most` the path that minimises the greatest `peak`, where there is a path."""
    nodes = len(graph.position)
    least = np.full((most + 1, nodes), np.inf)
    least[0, graph.end] = 0.0
    choice = np.full((most + 1, nodes), -1)
    for stages in range(1, most + 1):
        reached = np.maximum(least[stages - 1, graph.after], peak)
        order = np.argsort(-reached, kind="stable")  # the least is written last
        least[stages, graph.before[order]] = reached[order]
        choice[stages, graph.before[order]] = order
        if np.isfinite(least[stages, graph.start]):
            yield _path(graph, choice, stages)


def _path(graph: StageGraph, choice: IntArray, stages: int) -> Cuts:
    node, cuts = graph.start, []
    for left in range(stages, 0, -1):
        edge = int(choice[left, node])
        cuts.append((int(graph.first[edge]), int(graph.stop[edge])))
        node = int(graph.after[edge])
    return cuts
