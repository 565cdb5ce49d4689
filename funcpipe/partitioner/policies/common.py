"""What the policies share: making a plan from cuts and sizes, and taking the best of several."""

from collections.abc import Iterable, Sequence

from funcpipe.core import MB, Plan, Recompute
from funcpipe.errors import Infeasible
from funcpipe.partitioner.cost.loads import Setting
from funcpipe.partitioner.problem.problem import Problem, StageChoice

Cuts = Sequence[tuple[int, int]]


def fitted(problem: Problem, setting: Setting, cuts: Cuts, sizes: Sequence[int]) -> Plan | None:
    """The plan with the stages `cuts` on `sizes`, given by number; None if one does not fit or is not admitted.

    A stage that does not fit otherwise recomputes, where the training allows it.
    """
    if len(cuts) * setting.replicas > problem.max_functions:
        return None
    placed = problem.placed
    for (first, stop), size in zip(cuts, sizes, strict=True):
        if not placed.admits(first, stop) or size not in placed.sizes_of(first, stop):
            return None
    plan = problem.plan(setting, [StageChoice(*cut, size, False) for cut, size in zip(cuts, sizes, strict=True)])
    full = [not _fits(plan, i) for i in range(len(cuts))]
    if any(full) and problem.training.recompute is Recompute.AUTO:
        plan = problem.plan(setting, [StageChoice(*c, s, f) for c, s, f in zip(cuts, sizes, full, strict=True)])
        full = [not _fits(plan, i) for i in range(len(cuts))]
    return None if any(full) else plan


def best_of(problem: Problem, plans: Iterable[Plan | None], *, policy: str) -> Plan:
    """The plan with the best objective; raises Infeasible if none of them keeps the limits."""
    kept = [(problem.goal.of_plan(plan), plan) for plan in plans if plan is not None]
    possible = [(objective, plan) for objective, plan in kept if objective < float("inf")]
    if not possible:
        raise Infeasible(f"the policy {policy} knows no plan that keeps all limits; the policy funcpipe may find one")
    return min(possible, key=lambda pair: pair[0])[1]


def _fits(plan: Plan, stage: int) -> bool:
    assert plan.estimate is not None
    return plan.estimate.stages[stage].memory_bytes <= plan.stages[stage].memory_mb * MB
