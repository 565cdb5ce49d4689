"""The best way to synchronise for a plan that has been found: all ways are compared, not only those searched with."""

from collections.abc import Iterator
from dataclasses import replace

from funcpipe.core import Plan, Streams, Sync
from funcpipe.errors import PlanError
from funcpipe.partitioner.cost.evaluate import check_memory, evaluate
from funcpipe.partitioner.cost.sync_choice import candidates
from funcpipe.partitioner.problem.problem import Problem


def with_best_sync(plan: Plan, problem: Problem) -> Plan:
    """`plan` with the way to synchronise that is best for the goal, and the solver's report with its new objective.

    A way that the training asks for is kept.
    """
    if problem.training.sync is not None or plan.replicas == 1:
        return plan
    best = min([plan, *_variants(plan, problem)], key=problem.goal.of_plan)
    if best.solver is not None:
        solver = replace(best.solver, objective=problem.goal.of_plan(best))
        best = replace(best, solver=solver)
    return best


def _variants(plan: Plan, problem: Problem) -> Iterator[Plan]:
    ways: list[tuple[Sync, Streams | None]] = [(Sync.THREE_PHASE, None), (Sync.PIPELINED, None)]
    for sync, streams in [*ways, *candidates(plan.replicas, sharded=plan.is_sharded)]:
        variant = replace(plan, sync=sync, streams=streams)
        estimate = evaluate(variant, problem.profile, problem.spec)
        try:
            check_memory(variant, estimate)
        except PlanError:
            continue
        yield replace(variant, estimate=estimate)
