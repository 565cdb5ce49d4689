"""Every stage that a plan may have under one setting, priced: the edges of the stage graph times the function sizes."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from funcpipe.core import LayerProfile, ModelProfile, Recompute
from funcpipe.partitioner.cost import column_of, saved_inputs_bytes
from funcpipe.partitioner.formulas import (
    Array,
    Loads,
    Setting,
    Traffic,
    compute_work_s,
    lane_times,
    memory_use,
    request_usd,
    requests,
    sync_times,
)
from funcpipe.partitioner.pins import NO_PINS
from funcpipe.partitioner.problem import Choice, Problem
from funcpipe.partitioner.stage_graph import IntArray, StageGraph

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Stages that fit their functions; one array element each. Seconds of a micro-batch, dollars of all replicas.

    `price_usd_s` times the seconds of an iteration, plus `request_usd`, is the option's share of the iteration's
    dollars; `work_s` its share of the seconds of processors.
    """

    edge: IntArray
    before: IntArray
    after: IntArray
    size: IntArray
    recompute: BoolArray
    forward_sum_s: Array
    forward_max_s: Array
    backward_sum_s: Array
    backward_max_s: Array
    sync_s: Array
    price_usd_s: Array
    request_usd: Array
    work_s: Array

    def __len__(self) -> int:
        return len(self.edge)

    def take(self, which: IntArray | BoolArray) -> "Options":
        """Those options alone, in that order."""
        return Options(**{item.name: getattr(self, item.name)[which] for item in fields(self)})

    def at(self, *, before: IntArray, after: IntArray) -> "Options":
        """The same options between other nodes."""
        return replace(self, before=before, after=after)

    def choice(self, option: int, graph: StageGraph) -> Choice:
        """The stage that the option stands for."""
        edge = self.edge[option]
        return Choice(
            int(graph.first[edge]), int(graph.stop[edge]), int(self.size[option]), bool(self.recompute[option])
        )


def price_options(problem: Problem, graph: StageGraph, setting: Setting, *, workers: int) -> Options:
    """The options of `graph` under `setting` while `workers` functions share the platform's links.

    Recomputation costs time and saves memory only: it is an option where the stage does not fit without it.
    """
    plain, admitted = edge_loads(problem, graph, recompute=False), _admitted(problem, graph)
    chosen = admitted & (memory_use(plain, setting).total_bytes <= _memory_bytes(problem))
    fits, loads = chosen, plain
    if problem.training.recompute is Recompute.AUTO:
        saving = edge_loads(problem, graph, recompute=True)
        fits = chosen | admitted & (memory_use(saving, setting).total_bytes <= _memory_bytes(problem))
        loads = edge_loads(problem, graph, recompute=fits & ~chosen)
    lanes = lane_times(loads, setting, workers=workers)
    puts, gets = requests(loads.traffic, setting)
    edge, size = np.nonzero(fits)
    picked = (edge, size)
    return Options(
        edge=edge,
        before=graph.before[edge],
        after=graph.after[edge],
        size=size,
        recompute=np.broadcast_to(loads.recompute, fits.shape)[picked],
        forward_sum_s=lanes.forward_sum_s[picked],
        forward_max_s=lanes.forward_max_s[picked],
        backward_sum_s=lanes.backward_sum_s[picked],
        backward_max_s=lanes.backward_max_s[picked],
        sync_s=np.broadcast_to(sync_times(loads, setting, workers=workers), fits.shape)[picked],
        price_usd_s=setting.replicas * loads.price_usd_s[0, size],
        request_usd=request_usd(puts, gets, setting.spec)[edge, 0],
        work_s=compute_work_s(lanes, setting)[picked],
    )


def least_memory_bytes(problem: Problem, graph: StageGraph, setting: Setting) -> Array:
    """For each edge what a function must have in the least hungry way that the training allows."""
    least = memory_use(edge_loads(problem, graph, recompute=False), setting).total_bytes[:, 0]
    if problem.training.recompute is Recompute.AUTO:
        again = memory_use(edge_loads(problem, graph, recompute=True), setting).total_bytes[:, 0]
        least = np.minimum(least, again)
    return least


def _admitted(problem: Problem, graph: StageGraph) -> BoolArray:
    """Whether the pins admit an edge on a size."""
    admitted = np.zeros((len(graph.first), len(problem.spec.sizes)), dtype=bool)
    if problem.pins == NO_PINS:
        return ~admitted
    for edge, (first, stop) in enumerate(zip(graph.first, graph.stop, strict=True)):
        admitted[edge, list(problem.placed.sizes_of(int(first), int(stop)))] = True
    return admitted


def _memory_bytes(problem: Problem) -> Array:
    return np.array([[size.memory_bytes for size in problem.spec.sizes]], dtype=np.float64)


def edge_loads(problem: Problem, graph: StageGraph, *, recompute: BoolArray | bool) -> Loads:
    """What a stage of each edge computes, holds and sends, in a row, on functions of each size, in a column."""
    profile, sizes = problem.profile, problem.spec.sizes
    columns = [column_of(size.name, profile) for size in sizes]
    traffic = Traffic(**{item.name: getattr(graph.traffic, item.name)[:, None] for item in fields(Traffic)})

    def total(value: Callable[[LayerProfile], object]) -> Array:
        return _edge_sums(profile, graph, value)

    inputs = total(lambda layer: layer.input_bytes)
    return Loads(
        forward_s=total(lambda layer: layer.forward_s)[:, columns],
        backward_s=total(lambda layer: layer.backward_s)[:, columns],
        parameter_bytes=total(lambda layer: layer.parameter_bytes),
        constant_bytes=total(lambda layer: layer.constant_bytes),
        activation_bytes=total(lambda layer: layer.activation_bytes),
        input_bytes=inputs + traffic.forward_in_bytes,
        saved_input_bytes=saved_inputs_bytes(graph.first, graph.stop, profile)[:, None],
        workspace_bytes=_most_workspace_bytes(profile, graph)[:, None],
        recompute=np.broadcast_to(np.array(recompute), (len(graph.first), len(sizes))),
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
