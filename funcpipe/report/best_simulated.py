"""The best of a few plans by simulation, where the closed form cannot rank them.

The closed form is a few per cent off the simulator: it takes lanes to be even, and ignores that transfers wait for each
other. Plans that lie closer together than that are better compared by simulating an iteration of each.
"""

from dataclasses import replace

import numpy as np

from funcpipe.core import NO_PINS, ModelProfile, Optimality, Pins, Plan, PlatformSpec, Trace, TrainingSpec
from funcpipe.partitioner.optimize import best_plans
from funcpipe.partitioner.problem.goal import goal_of
from funcpipe.report.predict import predict


def best_simulated(
    profile: ModelProfile,
    spec: PlatformSpec,
    training: TrainingSpec,
    count: int,
    *,
    pins: Pins = NO_PINS,
    time_limit_s: float | None = None,
    clipped: bool = False,
) -> Plan:
    """The best of the `count` best plans by the closed form when an iteration of each is simulated.

    Plans are those of `optimize`'s search that differ in cuts, replicas or schedule. The plan's report says what it
    takes when it is simulated. If none keeps the limits of `training` then, the first is taken. With `clipped`,
    gradients are clipped by their norm. A plan other than the first is not called optimal: the closed form knows a
    better one. Raises the errors of `optimize`.
    """
    plans = best_plans(profile, spec, training, count, pins=pins, time_limit_s=time_limit_s)
    taken = [_seconds_and_dollars(plan, predict(plan, profile, spec, clipped=clipped)) for plan in plans]
    seconds, dollars = np.array(taken).T
    number = int(goal_of(training, spec).objective(seconds, dollars).argmin())
    return _simulated(plans[0], plans[number], len(plans), *taken[number])


def _seconds_and_dollars(plan: Plan, trace: Trace) -> tuple[float, float]:
    estimate = plan.estimate
    assert estimate is not None
    return trace.end_s, estimate.usd_in(trace.end_s)


def _simulated(first: Plan, chosen: Plan, plans: int, seconds: float, dollars: float) -> Plan:
    proof, solver = first.solver, chosen.solver
    assert proof is not None
    assert solver is not None
    if chosen is not first and proof.bound is not None:
        gap = max(0.0, 1 - proof.bound / solver.objective) if solver.objective > 0 else 0.0
        solver = replace(solver, bound=proof.bound, gap=gap, status=Optimality.FEASIBLE)
    solver = replace(solver, simulated_plans=plans, simulated_s=seconds, simulated_usd=dollars)
    return replace(chosen, solver=solver)
