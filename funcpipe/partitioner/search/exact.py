"""The exact search: the best plan with proof, or the best plan so far with a bound, or why there is no plan.

It needs no solver. Where there is no plan, limits are dropped one after the other until there are plans. The order is:
numbers of replicas, deadline or budget, pins, sharing of parameters, number of functions, size of objects, memory. By
hand: with a deadline of 5 s there is no plan; without it the fastest takes 7 s, so the deadline is the cause. If there
were none without it either, the pins would be dropped next.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from funcpipe.core import MB, NO_PINS, ModelProfile, OptimizerKind, Plan, Recompute
from funcpipe.errors import Infeasible
from funcpipe.partitioner.problem.cuts import Borders
from funcpipe.partitioner.problem.goal import Goal
from funcpipe.partitioner.problem.options import least_memory
from funcpipe.partitioner.problem.problem import Problem, report
from funcpipe.partitioner.problem.stage_graph import TooEntangled, loose_stage_graph
from funcpipe.partitioner.search.incumbents import incumbents_for
from funcpipe.partitioner.search.search import Search, best_for
from funcpipe.partitioner.search.spaces import Space

Clock = Callable[[], float]
"""Seconds since some point in the past, such as `time.monotonic`."""


def exact(problem: Problem, *, time_limit_s: float | None = None, clock: Clock = time.monotonic) -> Plan:
    """The best plan; raises Infeasible when there is none.

    After `time_limit_s` seconds by `clock` the best plan so far is returned, with the bound that is proved by then. If
    no plan has been found yet, the search continues until there is one.
    """
    return best_plans(problem, 1, time_limit_s=time_limit_s, clock=clock)[0]


def best_plans(
    problem: Problem, count: int, *, time_limit_s: float | None = None, clock: Clock = time.monotonic
) -> list[Plan]:
    """The plan of `exact`, and the best other ones that the search met, at most `count` in all, best first.

    They differ in cuts, replicas or schedule. Only of the first one anything is proved.
    """
    started_s = clock()
    search = search_below(problem, math.inf, time_limit(started_s, time_limit_s, clock))
    if not search.found:
        raise explain_infeasible(problem)
    best = search.found[-1].plan(problem)
    plans = [report(best, problem, name="exact", bound=search.bound, solve_s=clock() - started_s)]
    others = [*search.found[:-1], *search.closest.values()] if count > 1 else []
    for found in sorted(others, key=lambda found: found.objective(problem.goal)):
        plan = found.plan(problem)
        if len(plans) < count and _shape(plan) not in map(_shape, plans):
            plans.append(report(plan, problem, name="exact", bound=None, solve_s=clock() - started_s))
    return plans


def _shape(plan: Plan) -> tuple[object, ...]:
    return plan.replicas, plan.schedule, [(stage.first, stage.stop) for stage in plan.stages]


def search_below(
    problem: Problem, cutoff: float, time_is_up: Callable[[], bool], among: Iterable[Space] | None = None
) -> Search:
    """The search, when it has run, for the best plan whose objective is below `cutoff`; infinite: for any.

    It looks into the spaces `among`, or into all.
    """
    search = Search(problem, incumbents_for(problem.goal, cutoff), time_is_up, among=among)
    search.run()
    return search


def time_limit(started_s: float, limit_s: float | None, clock: Clock = time.monotonic) -> Callable[[], bool]:
    """A function that says whether `limit_s` seconds have passed since `started_s`; never for None."""
    if limit_s is None:
        return lambda: False
    return lambda: clock() - started_s > limit_s


def explain_infeasible(problem: Problem) -> Infeasible:
    """The error to raise when no plan keeps the limits of `problem`: which limit, by how much, and what would help."""
    if not problem.degrees:
        return Infeasible(_no_degree(problem))
    unlimited = _without_limits(problem)
    fastest = _fastest(unlimited)
    if fastest is not None:
        return Infeasible(_limits(problem, unlimited, fastest))
    pins = _pins_in_the_way(unlimited)
    if pins:
        return Infeasible(f"no plan follows all pins; without {' or without '.join(pins)} there are plans")
    if problem.training.shard_optimizer and not problem.training.trains_locally:
        plain = replace(unlimited, training=replace(unlimited.training, shard_optimizer=False))
        if _fastest(plain) is not None:
            return Infeasible(
                "no plan keeps all layers that share parameters in one stage, as an optimiser divided over replicas "
                "asks; without shard_optimizer, or with a single replica, there are plans"
            )
    many = replace(unlimited, spec=replace(problem.spec, max_functions=10**9))
    if _fastest(many) is not None:
        return Infeasible(
            f"no plan fits into {problem.max_functions} functions at once, the most that {problem.spec.name} "
            "or the pins allow; allow more functions, or choose a larger size"
        )
    if _fastest(replace(unlimited, spec=unlimited.spec.without_object_limits())) is not None:
        return Infeasible(_objects(problem))
    return Infeasible(_memory(problem))


def _objects(problem: Problem) -> str:
    """The limits of the stores, one of which each plan breaks."""
    chosen = [("messages", problem.stores.messages), ("sums", problem.stores.sums)]
    sizes = [(kind, name, problem.spec.store(name).largest_bytes) for kind, name in chosen]
    limits = [f"{most} bytes at most in {name!r}, where {kind} are" for kind, name, most in sizes if most is not None]
    return (
        f"every plan writes an object that is too large for its store: {problem.spec.name} takes objects of "
        f"{' and '.join(limits)}; choose another store, or a smaller micro-batch"
    )


def _without_limits(problem: Problem) -> Problem:
    return replace(
        problem,
        training=replace(problem.training, deadline_s=None, budget_usd=None),
        spec=replace(problem.spec, lifetime_s=None),
        fitting=None,
    )


def _fastest(problem: Problem) -> Plan | None:
    """The plan with the shortest iteration; a fast one, if there is any, where there are too many ways to cut."""
    return _best(problem, Goal(counts_seconds=True))


def _best(problem: Problem, goal: Goal) -> Plan | None:
    try:
        return best_for(problem, goal)
    except TooEntangled:
        return best_for(problem, goal, graph=problem.loose_graph)


def _no_degree(problem: Problem) -> str:
    wanted = "any" if problem.training.replicas is None else ", ".join(map(str, problem.training.replicas))
    pinned = "any" if problem.pins.replicas is None else ", ".join(map(str, problem.pins.replicas))
    return (
        f"no number of replicas is left: the training admits {wanted}, the pins {pinned}, "
        f"and at most {problem.max_functions} functions run at once"
    )


def _limits(problem: Problem, unlimited: Problem, fastest: Plan) -> str:
    """The deadline, budget or function life that no plan keeps."""
    assert fastest.estimate is not None
    seconds = fastest.estimate.iteration_s
    shape = f"stages: {len(fastest.stages)}, replicas: {fastest.replicas}"
    if seconds > problem.goal.deadline_s:
        deadline_s = problem.training.deadline_s
        if deadline_s is not None and deadline_s <= problem.goal.deadline_s:
            what, first = f"no plan meets the deadline of {deadline_s:g} s", "allow more time"
        else:
            what = f"no iteration fits into the life of a function, {problem.goal.deadline_s:g} s after its cold start"
            first = "choose a smaller global batch"
        return f"{what}: the fastest takes {seconds:.4g} s ({shape}); {_more_speed(problem, first)}"
    cheapest = _best(unlimited, Goal(deadline_s=problem.goal.deadline_s))
    assert cheapest is not None
    assert cheapest.estimate is not None
    return (
        f"no plan stays within the budget of {problem.goal.budget_usd:.4g} $ for an iteration: the cheapest costs "
        f"{cheapest.estimate.cost_usd:.4g} $ and takes {cheapest.estimate.iteration_s:.4g} s; raise the budget"
    )


def _more_speed(problem: Problem, first: str) -> str:
    ways = [first]
    if problem.training.replicas is not None or problem.pins != NO_PINS:
        ways.append("admit other numbers of replicas or fewer pins")
    if 1.0 in (problem.training.wire.ratio, problem.training.wire_sync.ratio):
        ways.append("send half-precision tensors")
    return ", ".join(ways[:-1]) + " or " + ways[-1] if len(ways) > 1 else ways[0]


def _pins_in_the_way(problem: Problem) -> list[str]:
    """The pins each of which is enough to drop for there to be plans; or all of them together."""
    if problem.pins == NO_PINS or _fastest(replace(problem, pins=NO_PINS)) is None:
        return []
    names = [item.name for item in fields(problem.pins)]
    changed = [name for name in names if getattr(problem.pins, name) != getattr(NO_PINS, name)]
    alone = [
        name
        for name in changed
        if _fastest(replace(problem, pins=replace(problem.pins, **{name: getattr(NO_PINS, name)}))) is not None
    ]
    return alone or [" and ".join(changed)]


@dataclass(frozen=True, slots=True)
class _Need:
    """The layer that needs most of the memory there is, when each layer is run where and how it needs least."""

    layer: int
    needs_bytes: float
    has_bytes: float
    on_device: bool
    first: int
    stop: int
    replicas: int

    @property
    def share(self) -> float:
        """Of the largest function, or of the largest GPU; above 1 where the layer does not fit."""
        return self.needs_bytes / self.has_bytes


def _memory(problem: Problem) -> str:
    need = _neediest(problem)
    where, largest = (" on the GPU", "GPU") if need.on_device else ("", "function")
    layer = problem.profile.layers[need.layer]
    place = (
        "in a stage of its own"
        if need.stop - need.first == 1
        else f"in the stage of layers {need.first} to {need.stop - 1}"
    )
    message = (
        f"layer {layer.name!r} needs at least {math.ceil(need.needs_bytes / MB)} MB{where} {place} with "
        f"{need.replicas} replicas (parameters {layer.parameter_bytes / MB:.0f} MB, activations of a micro-batch "
        f"{layer.activation_bytes / MB:.0f} MB, base {problem.profile.base_memory_bytes / MB:.0f} MB), "
        f"the largest {largest} has {need.has_bytes / MB:.0f} MB"
    )
    return f"{message}; {'; '.join(_remedies(problem, need, largest)) or 'split the layer'}"


def _neediest(problem: Problem) -> _Need:
    """The layer that needs most memory, under the setting for which that is least."""
    borders = Borders.of(len(problem.profile.layers), admits=problem.placed.admits)
    graph = loose_stage_graph(problem.profile, borders)
    found = []
    for setting in problem.settings():
        needs, has, on_device = least_memory(problem, graph, setting)
        best = []
        for layer in range(graph.layers):
            edges = np.flatnonzero((graph.first <= layer) & (layer < graph.stop))
            edge = int(edges[(needs / has)[edges].argmin()])
            stage = int(graph.first[edge]), int(graph.stop[edge])
            memory = float(needs[edge]), float(has[edge]), bool(on_device[edge])
            best.append(_Need(layer, *memory, *stage, setting.replicas))
        found.append(max(best, key=lambda need: need.share))
    return min(found, key=lambda need: need.share)


def _remedies(problem: Problem, need: _Need, largest: str) -> Iterator[str]:
    """Remedies, and the memory that would then be needed."""
    trials = {
        "let stages recompute": replace(problem, training=replace(problem.training, recompute=Recompute.AUTO)),
        "use plain SGD": replace(problem, training=replace(problem.training, optimizer=OptimizerKind.SGD)),
        "admit all schedules": replace(problem, training=replace(problem.training, schedule=None)),
        "admit all numbers of replicas": replace(problem, training=replace(problem.training, replicas=None)),
    }
    half = problem.profile.micro_batch // 2
    if half and problem.profile.micro_batch % 2 == 0:
        trials[f"profile with micro-batches of {half}"] = replace(problem, profile=_halved(problem.profile))
    for remedy, trial in trials.items():
        least = _neediest(trial)
        if least.share < need.share:
            verdict = "which fits" if least.share <= 1 else "not yet enough"
            yield f"{remedy}: {math.ceil(least.needs_bytes / MB)} MB, {verdict}"
    yield f"or a platform with {largest}s of {math.ceil(need.needs_bytes / MB)} MB"


def _halved(profile: ModelProfile) -> ModelProfile:
    """The profile with half the micro-batch, as if everything sent and kept were proportional to it."""
    layers = tuple(
        replace(
            layer,
            activation_bytes=layer.activation_bytes // 2,
            device_activation_bytes=layer.kept_on_device_bytes // 2,
            input_bytes=layer.input_bytes // 2,
        )
        for layer in profile.layers
    )
    tensors = tuple(replace(tensor, forward_bytes=tensor.forward_bytes // 2) for tensor in profile.tensors)
    data = profile.data
    if data is not None:
        data = replace(data, batch_bytes=data.batch_bytes // 2, target_bytes=data.target_bytes // 2)
    return replace(profile, micro_batch=profile.micro_batch // 2, layers=layers, tensors=tensors, data=data)
