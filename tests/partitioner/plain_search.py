"""A second oracle: every Pareto-best partial plan kept, nothing else pruned. Slow, but good for ten layers.

Each stage has every way of synchronising that no other one beats.
"""

import numpy as np

from funcpipe.partitioner.cost import Array
from funcpipe.partitioner.cost.loads import Setting
from funcpipe.partitioner.problem.options import Options, price_options, ways
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.problem.stage_graph import StageGraph
from funcpipe.scheduler.pipeline import in_flight


def plain_points(problem: Problem) -> list[tuple[float, float]]:
    """Seconds and dollars of plans among which are all that no other plan beats in both, in ascending order."""
    graph = problem.stage_graph
    points: list[tuple[float, float]] = []
    for setting in problem.settings():
        options = price_options(problem, graph, ways(problem, graph), setting, workers=setting.replicas)
        seconds, dollars = _totals(_labels(graph, options, setting), setting)
        points += list(zip(seconds.tolist(), dollars.tolist(), strict=True))
    return sorted(points)


def _labels(graph: StageGraph, options: Options, setting: Setting) -> Array:
    """Rows of: forward sum and lane, backward sum and lane, latest finish, price, requests, work; at the start."""
    at_node: dict[tuple[int, int], Array] = {(0, 0): np.zeros((1, 8))}  # by node and number of stages behind it
    for node in range(1, len(graph.position)):
        parts: dict[int, list[Array]] = {}
        for o in np.flatnonzero(options.before == node):
            for behind in range(options.most_behind[o] + 1):
                if (options.after[o], behind) in at_node:
                    for way in range(options.ways.columns):
                        rows = _with_stage(at_node[options.after[o], behind], options, int(o), setting, behind, way)
                        parts.setdefault(behind + 1, []).append(rows)
        at_node |= {(node, behind): _unbeaten(np.concatenate(rows)) for behind, rows in parts.items()}
    found = [rows for (node, _), rows in at_node.items() if node == graph.start]
    return np.concatenate([np.zeros((0, 8)), *found])


def _with_stage(rows: Array, options: Options, o: int, setting: Setting, behind: int, way: int) -> Array:
    """The rows with the option in front, which holds as many micro-batches as the schedule says."""
    each = setting.micro_batches_each
    held = in_flight(setting.schedule, stage=3, stages=behind + 4, micro_batches=each)
    pace = options.costs.forward_lane_s[o]
    if held < each:
        pace = np.maximum(pace, (rows[:, 0] + rows[:, 2] + options.costs.round_s[o]) / held)
    rows = rows.copy()
    rows[:, 0] += options.costs.forward_sum_s[o]
    rows[:, 1] = np.maximum(rows[:, 1], pace)
    rows[:, 2] += options.costs.backward_sum_s[o]
    rows[:, 3] = np.maximum(rows[:, 3], options.costs.backward_lane_s[o])
    sync_s = options.ways.seconds[options.row[o], way]
    rows[:, 4] = np.maximum(rows[:, 4], rows[:, 2] + (each - 1) * rows[:, 3] + sync_s)
    rows[:, 5] += options.costs.price_usd_s[o]
    of = options.row[o]
    rows[:, 6] += options.costs.request_usd[o] - options.ways.usd_of(of, 0) + options.ways.usd_of(of, way)
    rows[:, 7] += options.costs.work_s[o] if setting.spec.shared_cores else 0.0
    return rows


def _unbeaten(rows: Array) -> Array:
    rows = rows[np.lexsort(rows.T[::-1])]
    kept: list[int] = []
    for i in range(len(rows)):
        if not (rows[kept] <= rows[i] * (1 + 1e-13)).all(axis=1).any():
            kept.append(i)
    return rows[kept]


def _totals(rows: Array, setting: Setting) -> tuple[Array, Array]:
    seconds = rows[:, 0] + (setting.micro_batches_each - 1) * rows[:, 1] + rows[:, 4]
    if setting.spec.shared_cores:
        seconds = np.maximum(seconds, rows[:, 7] / setting.spec.shared_cores)
    return seconds, rows[:, 5] * seconds + rows[:, 6]
