"""From a profile, a platform and what is wanted to a plan: merge the layers, find the plan, name its layers again.

    profile ── merge_layers ──> problem ── disentangled ──> problem ── search ──> plan ── unmerged ──> plan
               (to 40 layers)               (few enough edges)                             (all layers)

When skip connections make the stage graph too large, the problem is made small enough to search. First, stages that fit
no function are left out of the graph. If that is not enough, layers are merged further, until the graph is small
enough. What is merged must not cost much, nor make a plan impossible: the plans that are best and fastest on the loose
graph, which is small for any model, are found first, and their cuts are kept. As that graph says exactly what fits into
memory, there is a plan among the cuts that remain if there is any. Of all pairs of stores that plans may use, the graph
is made for the one that takes the largest objects, so it serves the others too.

By hand: 30 layers, and a graph with more than 100,000 edges from layer 6 on. The best plan of the loose graph cuts
before layers 9 and 20. The layers are merged to 24, as many as lie behind the place where the edges ran out, with cuts
before 9 and 20; if the graph is still too large, to fewer. In the end the three stages of that plan are left, whose
graph is a single path.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from funcpipe.core import (
    DEFAULT_STORES,
    NO_PINS,
    ModelProfile,
    Pins,
    Plan,
    PlanRequest,
    PlatformSpec,
    SolverReport,
    Stores,
    TrainingSpec,
)
from funcpipe.partitioner import PLANNED_LAYERS, find_policy
from funcpipe.partitioner.problem.cuts import PlacedPins, merge_layers, starts_of
from funcpipe.partitioner.problem.goal import (
    Goal,
    better_format,
    better_round,
    may_sum_in_8_bits,
    with_formats,
    without_idle_formats,
)
from funcpipe.partitioner.problem.options import fitting_stages
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.problem.stage_graph import EDGE_LIMIT, TooEntangled
from funcpipe.partitioner.search.exact import best_plans as search_best_plans
from funcpipe.partitioner.search.exact import exact
from funcpipe.partitioner.search.search import best_for
from funcpipe.partitioner.stores import (
    best_over_stores,
    exact_over_stores,
    in_stores,
    store_choices,
    with_checkpoints,
    with_largest_objects,
)

_SHRINK = 0.85
"""The share of layers that is left at most when the graph is too large."""


def disentangled(problem: Problem) -> Problem:
    """The problem itself, or one whose stage graph is small enough to search; its graph is made.

    The graph is the same for all stores that the training allows.
    """
    if _ways_left(problem) is None:
        return problem
    widest = replace(problem, stores=with_largest_objects(problem.spec, problem.training.stores))
    return in_stores(_small_enough(widest), problem.stores)


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


def optimize(
    profile: ModelProfile,
    spec: PlatformSpec,
    training: TrainingSpec,
    *,
    policy: str = "funcpipe",
    solver: str = "auto",
    time_limit_s: float | None = None,
    layer_limit: int = PLANNED_LAYERS,
    edge_limit: int = EDGE_LIMIT,
    pins: Pins = NO_PINS,
) -> Plan:
    """The best plan for `training` by `policy`; `solver` says how the policy 'funcpipe' finds it.

    A profile of more than `layer_limit` layers is merged first, and further while its stage graph would have more than
    `edge_limit` edges; the plan is optimal among the cuts that remain, as `plan.solver.merged_layers` says.
    With `sync_every` "auto" the best number of steps between meetings is chosen (`better_round`).
    Plans use those of the platform's stores that `training.stores` allows; the best are chosen.
    After `time_limit_s` seconds the best plan so far is returned, with what is proved about it in `plan.solver`.
    Raises Infeasible when no plan satisfies the limits, PlanError when batch, micro-batch and replicas do not divide or
    the profile lacks a size of the platform, SolverUnavailable, and InvalidValue for an unknown policy, solver or pin,
    or for what a solver's programme cannot express.
    """
    find, choices = find_policy(policy, solver), store_choices(spec, training.stores)
    request = PlanRequest(profile=profile, spec=spec, pins=pins)

    def planned(wanted: TrainingSpec) -> Plan:
        limits = {"layer_limit": layer_limit, "edge_limit": edge_limit}
        problem, starts = merged_problem(profile, spec, wanted, pins=pins, stores=choices[0], **limits)
        if find is exact:
            plan = exact_over_stores(problem, choices, time_limit_s=time_limit_s)
        else:
            plan = best_over_stores(problem, choices, find, time_limit_s=time_limit_s)
        plan = with_checkpoints(plan, in_stores(problem, plan.stores), training.stores.checkpoints)
        return with_origin(unmerged(plan, starts), training, request)

    if policy != "funcpipe":
        return better_round(training, planned)
    return better_round(training, partial(_in_best_formats, profile, planned))


def best_plans(
    profile: ModelProfile,
    spec: PlatformSpec,
    training: TrainingSpec,
    count: int,
    *,
    time_limit_s: float | None = None,
    pins: Pins = NO_PINS,
) -> list[Plan]:
    """The plan of `optimize`, and the best other ones that its search met: at most `count` in all, best first.

    They differ in cuts, replicas, schedule or formats, and use the same stores.
    """
    found: list[Plan] = []
    choices, request = store_choices(spec, training.stores), PlanRequest(profile=profile, spec=spec, pins=pins)

    def planned(wanted: TrainingSpec) -> Plan:
        stores = choices[0]
        problem, starts = merged_problem(profile, spec, wanted, pins=pins, layer_limit=PLANNED_LAYERS, stores=stores)
        plans, left_s = [], time_limit_s
        if len(choices) > 1:
            plans = [exact_over_stores(problem, choices, time_limit_s=time_limit_s)]
            problem = in_stores(problem, plans[0].stores)
            left_s = None if time_limit_s is None else max(0.0, time_limit_s - _report(plans[0]).solve_s)
        plans += search_best_plans(problem, count, time_limit_s=left_s)[len(plans) :]
        plans = [with_checkpoints(plan, problem, training.stores.checkpoints) for plan in plans]
        found.extend(with_origin(unmerged(plan, starts), training, request) for plan in plans)
        return found[-len(plans)]

    best = better_round(training, partial(_in_best_formats, profile, planned))
    others = [plan for plan in found if _decided(plan) != _decided(best)]
    return [best, *sorted(others, key=lambda plan: _report(plan).objective)][:count]


def _in_best_formats(profile: ModelProfile, planned: Callable[[TrainingSpec], Plan], training: TrainingSpec) -> Plan:
    """The better of what is `planned` with sums in bf16 and in int8, where `training` leaves that open."""
    if not may_sum_in_8_bits(training, profile.precision):
        return planned(training)
    return better_format(training, planned)


def _decided(plan: Plan) -> tuple[object, ...]:
    return plan.replicas, plan.schedule, plan.stages, plan.wires, plan.sync_every


def _report(plan: Plan) -> SolverReport:
    assert plan.solver is not None
    return plan.solver


def merged_problem(
    profile: ModelProfile,
    spec: PlatformSpec,
    training: TrainingSpec,
    *,
    pins: Pins,
    layer_limit: int,
    edge_limit: int = EDGE_LIMIT,
    stores: Stores = DEFAULT_STORES,
) -> tuple[Problem, tuple[int, ...]]:
    """The problem with at most `layer_limit` layers, and where each begins in the profile, with the end."""
    merged = merge_layers(profile, layer_limit, keep=PlacedPins(pins, profile, spec).kept)
    wanted = with_formats(training, profile.precision)
    problem = Problem(profile=merged, spec=spec, training=wanted, pins=pins, edge_limit=edge_limit, stores=stores)
    problem = disentangled(problem)
    return problem, starts_of(problem.profile, profile)


def unmerged(plan: Plan, starts: tuple[int, ...]) -> Plan:
    """`plan` in terms of the layers before merging; `starts` says where each merged layer begins."""
    stages = tuple(replace(stage, first=starts[stage.first], stop=starts[stage.stop]) for stage in plan.stages)
    solver = plan.solver
    if solver is not None and len(starts) - 1 < starts[-1]:
        solver = replace(solver, merged_layers=len(starts) - 1)
    return replace(plan, stages=stages, solver=solver)


def with_origin(plan: Plan, training: TrainingSpec, request: PlanRequest) -> Plan:
    """`plan`, which remembers the parameters of each stage, what was asked for, and what it was chosen from."""
    profile = request.profile
    stages = tuple(
        replace(
            stage,
            parameter_bytes=profile.parameter_bytes(stage.first, stage.stop),
            constant_bytes=sum(layer.constant_bytes for layer in profile.layers[stage.first : stage.stop]),
        )
        for stage in plan.stages
    )
    return replace(without_idle_formats(plan, training), stages=stages, made_for=training, request=request)
