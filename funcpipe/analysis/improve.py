"""Better plans: the best of a few by simulation, and single changes of a plan, each priced by the cost model.

The closed form is a few per cent off the simulator: it takes lanes to be even, and ignores that transfers wait for each
other. Plans that lie closer together than that are better compared by simulating an iteration of each.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from funcpipe.analysis.predict import mean_step_s
from funcpipe.core import (
    NO_PINS,
    SYNC_WIRES,
    ModelProfile,
    Optimality,
    Pins,
    Plan,
    PlatformSpec,
    ScheduleKind,
    Sync,
    TrainingSpec,
    Wire,
)
from funcpipe.errors import InvalidValue, PlanError
from funcpipe.partitioner.cost.evaluate import check_memory, evaluate
from funcpipe.partitioner.optimize import best_plans
from funcpipe.partitioner.problem.goal import goal_of


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
    taken = [_seconds_and_dollars(plan, mean_step_s(plan, profile, spec, clipped=clipped)) for plan in plans]
    seconds, dollars = np.array(taken).T
    number = int(goal_of(training, spec).objective(seconds, dollars).argmin())
    return _simulated(plans[0], plans[number], len(plans), *taken[number])


def _seconds_and_dollars(plan: Plan, seconds: float) -> tuple[float, float]:
    estimate = plan.estimate
    assert estimate is not None
    return seconds, estimate.usd_in(seconds)


def _simulated(first: Plan, chosen: Plan, plans: int, seconds: float, dollars: float) -> Plan:
    proof, solver = first.solver, chosen.solver
    assert proof is not None
    assert solver is not None
    if chosen is not first and proof.bound is not None:
        gap = max(0.0, 1 - proof.bound / solver.objective) if solver.objective > 0 else 0.0
        solver = replace(solver, bound=proof.bound, gap=gap, status=Optimality.FEASIBLE)
    solver = replace(solver, simulated_plans=plans, simulated_s=seconds, simulated_usd=dollars)
    return replace(chosen, solver=solver)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a plan, all else as it is; by how much an iteration's seconds and dollars would grow."""

    what: str
    more_s: float
    more_usd: float
    numerics: bool = False

    @property
    def is_better(self) -> bool:
        """True if it saves time or money, by more than rounding."""
        return self.more_s < -1e-9 or self.more_usd < -1e-12


def changes(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> tuple[Change, ...]:
    """Every single change that fits into memory and saves time or money, those first that save both, then by seconds.

    Tried are: each stage on another size, or recomputing or not, the other schedules, ways of synchronising, and
    formats of fewer bits. Raises PlanError if the arguments do not belong together.
    """
    now = evaluate(plan, profile, spec)
    found = []
    for what, other in _neighbours(plan, profile, spec):
        try:
            estimate = evaluate(other, profile, spec)
            check_memory(other, estimate)
        except PlanError:
            continue  # it does not fit, so it is no change to propose
        found.append(
            Change(
                what=what,
                more_s=estimate.iteration_s - now.iteration_s,
                more_usd=estimate.cost_usd - now.cost_usd,
                numerics=other.wires != plan.wires,
            )
        )
    better = [change for change in found if change.is_better]
    return tuple(sorted(better, key=lambda c: (c.more_s > 0 or c.more_usd > 0, c.more_s)))


def _neighbours(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> Iterator[tuple[str, Plan]]:
    for number, stage in enumerate(plan.stages):
        others = [replace(stage, recompute=not stage.recompute)]
        others += [
            replace(stage, size=size.name, memory_mb=size.memory_mb)
            for size in spec.sizes
            if size.name in profile.sizes and size.name != stage.size
        ]
        for other in others:
            how = "recomputes" if other.recompute else "keeps its activations"
            what = f"stage {number} on {other.size}" if other.size != stage.size else f"stage {number} {how}"
            yield what, replace(plan, stages=(*plan.stages[:number], other, *plan.stages[number + 1 :]))
    for schedule in set(ScheduleKind) - {plan.schedule}:
        yield f"schedule {schedule.value}", replace(plan, schedule=schedule)
    yield from _other_sums(plan)
    for wire in (Wire.BF16, Wire.INT8) if len(plan.stages) > 1 else ():
        if wire.ratio < plan.wire.ratio:
            yield f"activations in {wire.value}", replace(plan, wire=wire)


def _other_sums(plan: Plan) -> Iterator[tuple[str, Plan]]:
    if plan.replicas == 1:
        return
    for sync in Sync:
        if sync is not plan.sync:
            try:
                other = replace(plan, sync=sync, streams=None)
            except InvalidValue:
                continue  # with an optimiser that is divided, not every way can be taken
            yield f"synchronisation {sync.value}", other
    for wire in SYNC_WIRES:
        if wire is not plan.wire_sync:
            yield f"sums in {wire.value}", replace(plan, wire_sync=wire)
