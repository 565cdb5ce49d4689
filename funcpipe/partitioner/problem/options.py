"""Every stage that a plan may have under one setting, priced: the edges of the stage graph times the function sizes.

An *option* is one stage of some plan: an edge of the stage graph (which layers), a function size, and whether the stage
recomputes its activations. Its seconds, dollars and bytes are constants, so they are computed once, by the cost model,
for all edges (rows) and sizes (columns) together; pairs that do not fit the function's memory are left out.

By hand: a chain of 3 layers has 6 edges (0-1, 0-2, 0-3, 1-2, 1-3, 2-3). With 2 sizes these are 12 pairs; where
recomputation is allowed there are up to 24 options. With 40 layers and 8 sizes: 820 edges, 6,560 pairs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from funcpipe.core import NO_PINS, LayerProfile, ModelProfile, Recompute
from funcpipe.partitioner.cost import Array, BoolArray, IntArray
from funcpipe.partitioner.cost.backward_peaks import BackwardPeaks, backward_peaks, most_workspace_bytes
from funcpipe.partitioner.cost.evaluate import column_of, held_inputs_bytes, loading_of
from funcpipe.partitioner.cost.formulas import admitted, lane_times, memory_use, stage_costs
from funcpipe.partitioner.cost.loads import Loads, Setting, StageTraffic, Ties, functions_of, stage_ties
from funcpipe.partitioner.cost.pipeline import StageCosts
from funcpipe.partitioner.cost.sync_ways import WayTable, way_table
from funcpipe.partitioner.problem.problem import Problem, StageChoice
from funcpipe.partitioner.problem.stage_graph import StageGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Stages that fit their functions; one array element each.

    An option is edge `edge` of the stage graph, with the layers from `first` up to `stop`, on size number `size`, and
    leads from node `before` to node `after`. It
    fits its function with at most `most_behind` stages behind it. `costs.share` is set where the number of stages
    behind the option is known, and is 0 elsewhere, which is a lower bound.

    Its ways of synchronising are row `row` of the table `ways`. The costs are those of the fastest, with the requests
    of way `fewest`: a lower bound where the option needs at least that one to be in time.
    """

    edge: IntArray
    before: IntArray
    after: IntArray
    size: IntArray
    recompute: BoolArray
    most_behind: IntArray
    costs: StageCosts
    first: IntArray
    stop: IntArray
    row: IntArray
    fewest: IntArray
    ways: WayTable

    def __len__(self) -> int:
        return len(self.edge)

    def take(self, which: IntArray | BoolArray) -> "Options":
        """Those options alone, in that order."""
        return Options(
            edge=self.edge[which],
            before=self.before[which],
            after=self.after[which],
            size=self.size[which],
            recompute=self.recompute[which],
            most_behind=self.most_behind[which],
            costs=StageCosts(*(column[which] for column in self.costs)),
            first=self.first[which],
            stop=self.stop[which],
            row=self.row[which],
            fewest=self.fewest[which],
            ways=self.ways,
        )

    def needing(self, fewest: IntArray) -> "Options":
        """The options if each needs at least the way `fewest`."""
        more_usd = self.ways.usd_of(self.row, fewest) - self.ways.usd_of(self.row, self.fewest)
        request_usd = self.costs.request_usd + more_usd
        return replace(self, fewest=fewest, costs=self.costs._replace(request_usd=request_usd))

    def choice(self, option: int, way: int, graph: StageGraph) -> StageChoice:
        """The stage that the option stands for, in a way of synchronising."""
        edge = self.edge[option]
        return StageChoice(
            first=int(graph.first[edge]),
            stop=int(graph.stop[edge]),
            size=int(self.size[option]),
            recompute=bool(self.recompute[option]),
            way=self.ways.way(int(self.row[option]), way),
        )


def ways(problem: Problem, graph: StageGraph) -> tuple[Loads, ...]:
    """The loads of the stages of all edges: when they keep their activations, then, where the training
    allows it, when they recompute them.
    """
    plain = edge_loads(problem, graph)
    if problem.training.recompute is Recompute.NEVER:
        return (plain,)
    return plain, replace(plain, recompute=np.ones_like(plain.recompute))


def price_options(
    problem: Problem,
    graph: StageGraph,
    loads: Sequence[Loads],
    setting: Setting,
    *,
    workers: int,
    ways: WayTable | None = None,
) -> Options:
    """The options of `graph` under `setting` while `workers` functions share the platform's links.

    `loads` are those of `ways`. A table of the `ways` that the setting has is made if none is given. Recomputation
    costs time and saves nothing but memory: it is an option only where the stage does not fit without it, or does not
    fit with as many stages behind it.
    """
    table = way_table(loads[0], setting, workers=workers) if ways is None else ways
    parts, enough = [], np.full((len(graph.first), len(problem.spec.sizes)), -1)
    for load in loads:
        most_behind = _most_behind(problem, graph, setting, load)
        most_behind = np.where(most_behind > enough, most_behind, -1)
        parts.append(_priced(graph, setting, load, most_behind, table, workers=workers))
        enough = np.maximum(enough, most_behind)
    joined = _joined(parts)
    return joined.take(np.lexsort((joined.recompute, joined.size, joined.edge)))


def _joined(parts: Sequence[Options]) -> Options:
    names = [name for name in Options.__dataclass_fields__ if name not in ("costs", "ways")]
    return Options(
        ways=parts[0].ways,
        costs=StageCosts(*(np.concatenate(columns) for columns in zip(*(part.costs for part in parts), strict=True))),
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names},
    )


def _most_behind(problem: Problem, graph: StageGraph, setting: Setting, loads: Loads) -> IntArray:
    """The most stages that may lie behind a stage of each edge, on each size, so that it fits; −1 where it never does.

    The more stages lie behind it, the more micro-batches it holds.
    """
    held = setting.held_micro_batches(graph.layers)[::-1]
    most_behind = np.full((len(graph.first), len(problem.spec.sizes)), -1)
    for behind in np.flatnonzero(np.diff(held, append=np.inf)):  # the last of those that hold as many
        fits = memory_use(loads, setting, held[behind]).fits(loads)
        most_behind = np.where(fits, behind, most_behind)
    possible = admitted(loads, setting) & _admitted(problem, graph) & (most_behind >= _least_behind(graph)[:, None])
    return np.where(possible, most_behind, -1)


def _least_behind(graph: StageGraph) -> IntArray:
    """The least number of stages behind each edge."""
    return np.where(graph.stop < graph.layers, 1, 0)


def _priced(
    graph: StageGraph, setting: Setting, loads: Loads, most_behind: IntArray, table: WayTable, *, workers: int
) -> Options:
    """The options of the edges and sizes that fit with some stages behind them."""
    lanes = lane_times(loads, setting, workers=workers)
    costs = stage_costs(loads, lanes, table.seconds[table.row, -1], setting, ())
    costs = costs._replace(request_usd=costs.request_usd + table.usd_of(table.row, 0))
    edge, size = picked = np.nonzero(most_behind >= 0)
    return Options(
        edge=edge,
        before=graph.before[edge],
        after=graph.after[edge],
        size=size,
        recompute=np.broadcast_to(loads.recompute, most_behind.shape)[picked],
        most_behind=most_behind[picked],
        costs=StageCosts(*(np.broadcast_to(column, most_behind.shape)[picked] for column in costs)),
        first=graph.first[edge],
        stop=graph.stop[edge],
        row=table.row[picked],
        fewest=np.zeros(len(edge), dtype=np.int64),
        ways=table,
    )


def least_memory(problem: Problem, graph: StageGraph, setting: Setting) -> tuple[Array, Array, BoolArray]:
    """For each edge the memory that is filled most, as `MemoryUse.tightest` has it, on the size and in the way of
    running the stage for which it is filled least.
    """
    held = setting.held_micro_batches(graph.layers + 1)[::-1][_least_behind(graph)][:, None]
    sizes = sorted(problem.placed.open_sizes)
    found = [memory_use(loads, setting, held).tightest(loads) for loads in ways(problem, graph)]
    needs, has, device = (
        np.concatenate([columns[:, sizes] for columns in kind], axis=1) for kind in zip(*found, strict=True)
    )
    least = np.arange(len(needs)), (needs / has).argmin(axis=1)
    return needs[least], has[least], device[least].astype(bool)


def fitting_stages(problem: Problem) -> frozenset[tuple[int, int]]:
    """The stages (first layer, layer behind the last) that fit some function under some setting."""
    graph = problem.loose_graph
    loads, fits = ways(problem, graph), np.zeros(len(graph.first), dtype=bool)
    for setting in problem.settings():
        for load in loads:
            fits |= (_most_behind(problem, graph, setting, load) >= 0).any(axis=1)
    return frozenset(zip(graph.first[fits].tolist(), graph.stop[fits].tolist(), strict=True))


def _admitted(problem: Problem, graph: StageGraph) -> BoolArray:
    """Element [edge, size]: whether the pins admit it."""
    admitted = np.zeros((len(graph.first), len(problem.spec.sizes)), dtype=bool)
    if problem.pins == NO_PINS:
        return ~admitted
    for edge, (first, stop) in enumerate(zip(graph.first, graph.stop, strict=True)):
        admitted[edge, list(problem.placed.sizes_of(int(first), int(stop)))] = True
    return admitted


def edge_loads(problem: Problem, graph: StageGraph) -> Loads:
    """The loads of stages: a row for each edge, a column for each function size."""
    profile, sizes = problem.profile, problem.spec.sizes
    columns = [column_of(size.name, profile) for size in sizes]
    traffic = StageTraffic(**{item.name: getattr(graph.traffic, item.name)[:, None] for item in fields(StageTraffic)})

    def total(value: Callable[[LayerProfile], object]) -> Array:
        return _edge_sums(profile, graph, value)

    inputs = total(lambda layer: layer.input_bytes)
    ties = stage_ties(graph.first, graph.stop, profile)
    return Loads(
        forward_s=total(lambda layer: layer.forward_s)[:, columns],
        backward_s=total(lambda layer: layer.backward_s)[:, columns],
        layer_parameter_bytes=total(lambda layer: layer.parameter_bytes),
        ties=Ties(**{item.name: getattr(ties, item.name)[:, None] for item in fields(Ties)}),
        constant_bytes=total(lambda layer: layer.constant_bytes),
        activation_bytes=total(lambda layer: layer.activation_bytes),
        input_bytes=inputs + traffic.forward_in_bytes,
        held_input_bytes=held_inputs_bytes(graph.first, graph.stop, profile)[:, None],
        workspace_bytes=most_workspace_bytes(graph.first, graph.stop, profile)[:, None],
        device_activation_bytes=total(lambda layer: layer.kept_on_device_bytes),
        peaks=BackwardPeaks(*(column[:, None] for column in backward_peaks(graph.first, graph.stop, profile))),
        **{name: column[:, None] for name, column in loading_of(graph.first, graph.stop, profile).items()},
        is_last=(graph.stop == graph.layers)[:, None].astype(np.float64),
        recompute=np.zeros((len(graph.first), len(sizes)), dtype=bool),
        traffic=traffic,
        **{name: column[None] for name, column in functions_of(sizes).items()},
    )


def _edge_sums(profile: ModelProfile, graph: StageGraph, value: Callable[[LayerProfile], object]) -> Array:
    """The sums of a layer's value, or row of values, over the layers of each edge."""
    rows = np.array([value(layer) for layer in profile.layers], dtype=np.float64).reshape(graph.layers, -1)
    upto = np.concatenate([np.zeros((1, rows.shape[1])), rows.cumsum(axis=0)])
    sums: Array = upto[graph.stop] - upto[graph.first]
    return sums
