"""Every plan there is, priced one after the other: slow and obvious, so every other search is tested against it.

A plan ends with the synchronisation of some stage in some way: for each of these ends, all other stages take the way
with the fewest requests that is in time.

By hand: 3 layers can be cut in 4 ways (0-3; 0-1-3; 0-2-3; 0-1-2-3); with 2 sizes and recomputation these are
4 + 16 + 16 + 64 = 100 plans for each setting. For each way to cut, all choices of size and recomputation are priced at
once: arrays have a row for each choice (variant) and a column for each stage.
"""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields

import numpy as np

from funcpipe.core import ModelProfile, Plan, Recompute, Stage, SyncWay, find_routes, stages_of_layers
from funcpipe.errors import Infeasible
from funcpipe.partitioner.cost import Array, IntArray
from funcpipe.partitioner.cost.backward_peaks import BackwardPeaks
from funcpipe.partitioner.cost.evaluate import column_of, plan_traffic
from funcpipe.partitioner.cost.formulas import admitted, lane_times, memory_use, stage_costs
from funcpipe.partitioner.cost.loads import Loads, Setting, Ties, functions_of
from funcpipe.partitioner.cost.pipeline import PlanCosts, StageCosts, plan_costs
from funcpipe.partitioner.cost.stores import way_fits, way_usd
from funcpipe.partitioner.cost.sync_ways import sync_times, ways_of
from funcpipe.partitioner.problem.problem import Problem, StageChoice, report
from funcpipe.partitioner.search.exact import explain_infeasible


def exhaustive(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """The best plan, found by pricing all of them; for a handful of layers. Raises Infeasible.

    A time limit ends the search with the best plan so far, about which nothing is proved.
    """
    goal, started_s = problem.goal, time.monotonic()
    best, best_objective, complete = None, np.inf, True
    for setting, cuts in itertools.product(problem.settings(), all_cuts(len(problem.profile.layers))):
        if time_limit_s is not None and time.monotonic() - started_s > time_limit_s:
            complete = False
            break
        follows_pins = all(problem.placed.admits(first, stop) for first, stop in cuts)
        if not follows_pins or len(cuts) * setting.replicas > problem.max_functions:
            continue
        variants, plans = price_variants(problem, setting, cuts)
        objective = goal.objective(plans.iteration_s, plans.cost_usd)
        if objective.size and objective.min() < best_objective:
            best_objective, chosen = objective.min(), variants[int(objective.argmin())]
            best = setting, _choices(cuts, chosen)
    if best is None:
        raise explain_infeasible(problem) if complete else Infeasible("no plan was found within the time limit")
    bound = float(best_objective) if complete else None
    return report(problem.plan(*best), problem, name="exhaustive", bound=bound, solve_s=time.monotonic() - started_s)


def _choices(cuts: tuple[tuple[int, int], ...], variant: "_Variant") -> list[StageChoice]:
    return [
        StageChoice(first, stop, size, recompute, way)
        for (first, stop), (size, recompute, way) in zip(cuts, variant, strict=True)
    ]


_Variant = tuple[tuple[int, bool, SyncWay], ...]
"""For each stage its size, by number, whether it recomputes, and its way of synchronising."""


def price_variants(
    problem: Problem, setting: Setting, cuts: tuple[tuple[int, int], ...]
) -> tuple[list[_Variant], PlanCosts]:
    """Every choice of size, recomputation and way of synchronising for the stages `cuts` that fits its functions and
    may be best, and what each takes.
    """
    again = (False, True) if problem.training.recompute is Recompute.AUTO else (False,)
    one_stage = list(itertools.product(range(len(problem.spec.sizes)), again))
    variants = list(itertools.product(one_stage, repeat=len(cuts)))
    loads = _loads(problem, cuts, np.array(variants))
    workers = len(cuts) * setting.replicas
    held = setting.held_micro_batches(len(cuts))
    fits = np.asarray(memory_use(loads, setting, held).fits(loads).all(-1))
    sizes = [problem.placed.sizes_of(first, stop) for first, stop in cuts]
    fits &= [all(size in allowed for (size, _), allowed in zip(v, sizes, strict=True)) for v in variants]
    fits &= admitted(loads, setting).all(-1)
    lanes = lane_times(loads, setting, workers=workers)
    ways = ways_of(setting)
    sync_s = np.stack([sync_times(loads, setting, workers=workers, way=way) for way in ways])
    sync_s[~np.stack([np.broadcast_to(way_fits(way, loads, setting), sync_s.shape[1:]) for way in ways])] = np.inf
    usd = np.stack([np.broadcast_to(way_usd(way, loads, setting), sync_s.shape[1:]) for way in ways])
    stages = stage_costs(loads, lanes, np.zeros_like(sync_s[0]), setting, ())
    stages = stages._replace(share=setting.round_shares(len(cuts)))
    stages = StageCosts(*(np.broadcast_to(column, sync_s.shape[1:]) for column in stages))
    order = np.argsort(usd, axis=0, kind="stable")
    ends_s = _before_sync_s(stages, setting) + np.take_along_axis(sync_s, order, axis=0)
    chosen, number = [], []
    for variant in np.flatnonzero(fits):
        places = _cheapest_in_time(ends_s[:, variant])
        chosen.append(np.take_along_axis(order[:, variant], places, axis=0))
        number += [variant] * len(places)
    if not chosen:
        return [], PlanCosts(iteration_s=np.zeros(0), price_usd_s=np.zeros(0), request_usd=np.zeros(0))
    way, stage = np.concatenate(chosen), np.arange(len(cuts))
    priced = StageCosts(*(column[number] for column in stages))
    picked = way, np.array(number)[:, None], stage
    priced = priced._replace(sync_s=sync_s[picked], request_usd=priced.request_usd + usd[picked])
    taken = [
        tuple((size, again, ways[w]) for (size, again), w in zip(variants[v], row, strict=True))
        for v, row in zip(number, way, strict=True)
    ]
    return taken, plan_costs(priced, setting)


def _before_sync_s(stages: StageCosts, setting: Setting) -> Array:
    """When the stages of each plan begin to synchronise, after the forwards: written out, not by the recurrence."""
    sums, lanes = stages.backward_sum_s, stages.backward_lane_s
    starts = [sums[:, k:].sum(-1) + setting.meeting_repeats * lanes[:, k:].max(-1) for k in range(sums.shape[-1])]
    return np.stack(starts, axis=-1)


def _cheapest_in_time(ends_s: Array) -> IntArray:
    """For each time at which a plan may end (rows) the first way of each stage (columns) that ends by then.

    `ends_s` has a row for each way and a column for each stage. The earliest end up to each way falls, so the first way
    in time is where it reaches that time.
    """
    earliest_s = np.minimum.accumulate(ends_s, axis=0)
    limits_s = np.unique(earliest_s[np.isfinite(earliest_s)]) * (1 + 1e-12)
    places = np.stack([np.searchsorted(-column, -limits_s) for column in earliest_s.T], axis=-1)
    possible: IntArray = places[(places < len(ends_s)).all(axis=1)]
    return possible


def all_cuts(layers: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way to cut the layers into stages."""
    for count in range(layers):
        for inner in itertools.combinations(range(1, layers), count):
            yield tuple(itertools.pairwise((0, *inner, layers)))


def _loads(problem: Problem, cuts: tuple[tuple[int, int], ...], variants: Array) -> Loads:
    """A row for each variant, a column for each stage."""
    profile, sizes = problem.profile, problem.spec.sizes
    stages = [Stage(first=first, stop=stop, size="", memory_mb=1) for first, stop in cuts]
    traffic = plan_traffic(stages, profile)
    size, recompute = variants[..., 0], variants[..., 1].astype(bool)
    columns = np.array([column_of(size.name, profile) for size in sizes])
    layers = [profile.layers[first:stop] for first, stop in cuts]
    forward_s = np.array([[sum(x.forward_s[c] for x in part) for c in columns] for part in layers])
    backward_s = np.array([[sum(x.backward_s[c] for x in part) for c in columns] for part in layers])
    stage = np.arange(len(cuts))
    inputs = np.array([sum(x.input_bytes for x in part) for part in layers])
    return Loads(
        forward_s=forward_s[stage, size],
        backward_s=backward_s[stage, size],
        layer_parameter_bytes=np.array([sum(x.parameter_bytes for x in part) for part in layers], dtype=np.float64),
        ties=_ties(profile, stages),
        constant_bytes=np.array([sum(x.constant_bytes for x in part) for part in layers], dtype=np.float64),
        activation_bytes=np.array([sum(x.activation_bytes for x in part) for part in layers], dtype=np.float64),
        input_bytes=inputs + traffic.forward_in_bytes,
        held_input_bytes=np.array([_held_inputs(profile, first, stop) for first, stop in cuts], dtype=np.float64),
        workspace_bytes=np.array([max(x.workspace_bytes for x in part) for part in layers], dtype=np.float64),
        device_activation_bytes=np.array([sum(x.kept_on_device_bytes for x in part) for part in layers], dtype=float),
        peaks=BackwardPeaks(*np.array([_peaks(profile, first, stop) for first, stop in cuts]).T),
        loads_data=np.array([profile.loads_data(first, stop) for first, stop in cuts], dtype=np.float64),
        loaded_bytes=np.array([profile.loaded_bytes(first, stop) for first, stop in cuts], dtype=np.float64),
        is_last=(stage == len(cuts) - 1).astype(np.float64),
        recompute=recompute,
        traffic=traffic,
        **{name: column[size] for name, column in functions_of(sizes).items()},
    )


def _peaks(profile: ModelProfile, first: int, stop: int) -> tuple[float, float]:
    """Layer by layer, as a backward goes: another way than that of the cost model."""
    beyond, making, freed, made = -math.inf, -math.inf, 0, 0
    for number in range(stop - 1, first - 1, -1):
        layer = profile.layers[number]
        there = sum(x.backward_bytes for x in profile.tensors if x.producer <= number < x.consumers[-1]) - freed
        there += sum(x.backward_bytes for x in profile.tensors if number in x.consumers)
        beyond = max(beyond, there + layer.workspace_bytes)
        own = max(layer.workspace_bytes, layer.parameter_bytes - layer.kept_on_device_bytes)
        making = max(making, there + made + own)
        freed, made = freed + layer.kept_on_device_bytes, made + layer.parameter_bytes
    return beyond, making


def _ties(profile: ModelProfile, stages: Sequence[Stage]) -> Ties:
    """From the routes of the tied parameters, one after the other: another way than that of the cost model."""
    stage_of_layer = stages_of_layers((stage.first, stage.stop) for stage in stages)
    ties = Ties(**{item.name: np.zeros(len(stages)) for item in fields(Ties)})

    for tie in profile.ties:
        holders = [stage_of_layer[layer] for layer in tie.layers]
        for stage in set(holders):
            ties.repeated_bytes[stage] += (holders.count(stage) - 1) * tie.parameter_bytes
            ties.borrowed_bytes[stage] += (stage != holders[0]) * tie.parameter_bytes
            ties.lent_objects[stage] += stage == holders[0] != holders[-1]
    for route in find_routes(stage_of_layer, [], profile.ties).ties:
        for sender in route.stages:  # each sends one object: later holders their gradients, the first one the sum
            ties.upload_bytes[sender] += route.payload_bytes
            ties.upload_objects[sender] += 1
        for receiver in [*route.stages[:-1], *route.stages[1:]]:  # the gradients passed on, then the sum
            ties.download_bytes[receiver] += route.payload_bytes
            ties.download_objects[receiver] += 1
    return ties


def _held_inputs(profile: ModelProfile, first: int, stop: int) -> int:
    """The bytes of the tensors that a stage receives, except for those that count with a layer of the stage, which is
    the first to save them.
    """
    stage = range(first, stop)
    received = [t for t in profile.tensors if t.producer < first and any(layer in stage for layer in t.consumers)]
    return sum(tensor.forward_bytes for tensor in received if not set(tensor.saved_by[:1]) & set(stage))
