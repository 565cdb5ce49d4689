"""Every stage that a plan may have under one setting, priced: the edges of the stage graph times the function sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from funcpipe.core import LayerProfile, ModelProfile, Recompute
from funcpipe.partitioner.cost.evaluate import column_of, held_inputs_bytes
from funcpipe.partitioner.cost.formulas import (
    Array,
    Loads,
    Setting,
    StageTraffic,
    compute_work_s,
    lane_times,
    request_usd,
    requests,
    sync_times,
)
from funcpipe.partitioner.cost.memory import admitted, memory_use
from funcpipe.partitioner.cost.ties import Ties, stage_ties
from funcpipe.partitioner.problem.pins import NO_PINS
from funcpipe.partitioner.problem.problem import Choice, Problem
from funcpipe.partitioner.problem.stage_graph import IntArray, StageGraph

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Stages that fit their functions; one array element each. Seconds of a micro-batch, dollars of all replicas.

    `price_usd_s` times the seconds of an iteration, plus `request_usd`, is the option's share of the iteration's
    dollars; `work_s` its share of the seconds of processors. The stage fits with at most `most_behind` stages behind
    it. Where it is known how many there are, `share` is the stage's of `round_shares`; elsewhere it is 0.
    """

    edge: IntArray
    before: IntArray
    after: IntArray
    size: IntArray
    recompute: BoolArray
    most_behind: IntArray
    forward_sum_s: Array
    forward_lane_s: Array
    backward_sum_s: Array
    backward_lane_s: Array
    round_s: Array
    share: Array
    sync_s: Array
    price_usd_s: Array
    request_usd: Array
    work_s: Array

    def __len__(self) -> int:
        return len(self.edge)

    def take(self, which: IntArray | BoolArray) -> "Options":
        """Those options alone, in that order."""
        return Options(**{item.name: getattr(self, item.name)[which] for item in fields(self)})

    def at(self, *, before: IntArray, after: IntArray, share: Array | None = None) -> "Options":
        """The same options between other nodes."""
        return replace(self, before=before, after=after, share=self.share if share is None else share)

    def choice(self, option: int, graph: StageGraph) -> Choice:
        """The stage that the option stands for."""
        edge = self.edge[option]
        return Choice(
            int(graph.first[edge]), int(graph.stop[edge]), int(self.size[option]), bool(self.recompute[option])
        )


def ways(problem: Problem, graph: StageGraph) -> tuple[Loads, ...]:
    """What stages compute, hold and send when they keep their activations; when they recompute them, if they may."""
    plain = edge_loads(problem, graph)
    if problem.training.recompute is Recompute.NEVER:
        return (plain,)
    return plain, replace(plain, recompute=np.ones_like(plain.recompute))


def price_options(
    problem: Problem, graph: StageGraph, loads: Sequence[Loads], setting: Setting, *, workers: int
) -> Options:
    """The options of `graph` under `setting` while `workers` functions share the platform's links; `loads` = its ways.

    Recomputation costs time and saves memory only: it is an option where the stage does not fit without it, or not with
    as many stages behind it.
    """
    parts, enough = [], np.full((len(graph.first), len(problem.spec.sizes)), -1)
    for load in loads:
        most_behind = _most_behind(problem, graph, setting, load)
        most_behind = np.where(most_behind > enough, most_behind, -1)
        parts.append(_priced(graph, setting, load, most_behind, workers=workers))
        enough = np.maximum(enough, most_behind)
    joined = Options(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in Options.__dataclass_fields__})
    return joined.take(np.lexsort((joined.recompute, joined.size, joined.edge)))


def _most_behind(problem: Problem, graph: StageGraph, setting: Setting, loads: Loads) -> IntArray:
    """With how many stages behind it a stage of each edge fits a function of each size at most; −1 where it never does.

    The more there are, the more micro-batches it holds.
    """
    held = setting.held_micro_batches(graph.layers)[::-1]
    memory_bytes = np.array([[size.memory_bytes for size in problem.spec.sizes]], dtype=np.float64)
    most_behind = np.full((len(graph.first), len(problem.spec.sizes)), -1)
    for behind in np.flatnonzero(np.diff(held, append=np.inf)):  # the last of those that hold as many
        fits = memory_use(loads, setting, held[behind]).total_bytes <= memory_bytes
        most_behind = np.where(fits, behind, most_behind)
    possible = admitted(loads, setting) & _admitted(problem, graph) & (most_behind >= _least_behind(graph)[:, None])
    return np.where(possible, most_behind, -1)


def _least_behind(graph: StageGraph) -> IntArray:
    """How many stages lie at least behind each edge."""
    return np.where(graph.stop < graph.layers, 1, 0)


def _priced(graph: StageGraph, setting: Setting, loads: Loads, most_behind: IntArray, *, workers: int) -> Options:
    """The options of the edges and sizes that fit with some stages behind them."""
    lanes = lane_times(loads, setting, workers=workers)
    forward_lane_s, backward_lane_s = lanes.slowest(setting.schedule)
    puts, gets = requests(loads, setting)
    edge, size = picked = np.nonzero(most_behind >= 0)
    return Options(
        edge=edge,
        before=graph.before[edge],
        after=graph.after[edge],
        size=size,
        recompute=np.broadcast_to(loads.recompute, most_behind.shape)[picked],
        most_behind=most_behind[picked],
        forward_sum_s=lanes.forward_sum_s[picked],
        forward_lane_s=forward_lane_s[picked],
        backward_sum_s=lanes.backward_sum_s[picked],
        backward_lane_s=backward_lane_s[picked],
        round_s=lanes.round_s[picked],
        share=np.zeros(len(edge)),
        sync_s=np.broadcast_to(sync_times(loads, setting, workers=workers), most_behind.shape)[picked],
        price_usd_s=setting.replicas * loads.price_usd_s[0, size],
        request_usd=request_usd(puts, gets, setting.spec)[edge, 0],
        work_s=compute_work_s(lanes, setting)[picked],
    )


def least_memory_bytes(problem: Problem, graph: StageGraph, setting: Setting) -> Array:
    """For each edge what a function must have in the least hungry way that the training allows."""
    held = setting.held_micro_batches(graph.layers + 1)[::-1][_least_behind(graph)][:, None]
    needs = [memory_use(loads, setting, held).total_bytes[:, 0] for loads in ways(problem, graph)]
    least: Array = np.minimum.reduce(needs)
    return least


def _admitted(problem: Problem, graph: StageGraph) -> BoolArray:
    """Whether the pins admit an edge on a size."""
    admitted = np.zeros((len(graph.first), len(problem.spec.sizes)), dtype=bool)
    if problem.pins == NO_PINS:
        return ~admitted
    for edge, (first, stop) in enumerate(zip(graph.first, graph.stop, strict=True)):
        admitted[edge, list(problem.placed.sizes_of(int(first), int(stop)))] = True
    return admitted


def edge_loads(problem: Problem, graph: StageGraph) -> Loads:
    """What a stage of each edge computes, holds and sends, in a row, on functions of each size, in a column."""
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
        workspace_bytes=_most_workspace_bytes(profile, graph)[:, None],
        recompute=np.zeros((len(graph.first), len(sizes)), dtype=bool),
        traffic=traffic,
        upload_bytes_s=np.array([[size.upload_bytes_s for size in sizes]]),
        download_bytes_s=np.array([[size.download_bytes_s for size in sizes]]),
        price_usd_s=np.array([[size.price_usd_s for size in sizes]]),
    )


def _most_workspace_bytes(profile: ModelProfile, graph: StageGraph) -> Array:
    """For each edge the largest workspace of its layers."""
    workspace = np.array([layer.workspace_bytes for layer in profile.layers], dtype=np.float64)
    most = np.array([np.pad(np.maximum.accumulate(workspace[first:]), (first, 0)) for first in range(graph.layers)])
    found: Array = most[graph.first, graph.stop - 1]
    return found


def _edge_sums(profile: ModelProfile, graph: StageGraph, value: Callable[[LayerProfile], object]) -> Array:
    """The sums of a layer's value, or row of values, over the layers of each edge."""
    rows = np.array([value(layer) for layer in profile.layers], dtype=np.float64).reshape(graph.layers, -1)
    upto = np.concatenate([np.zeros((1, rows.shape[1])), rows.cumsum(axis=0)])
    sums: Array = upto[graph.stop] - upto[graph.first]
    return sums
