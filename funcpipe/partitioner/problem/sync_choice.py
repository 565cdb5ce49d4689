"""How the replicas of a plan synchronise: the best of all ways, for this very plan."""

from collections.abc import Iterator
from dataclasses import replace

from funcpipe.core import Plan, Streams, Sync
from funcpipe.errors import PlanError
from funcpipe.partitioner.cost.evaluate import check_memory, evaluate
from funcpipe.partitioner.cost.sync_forms import candidates
from funcpipe.partitioner.problem.problem import Problem


def tuned(plan: Plan, problem: Problem) -> Plan:
    """`plan`, synchronised as the goal wants it most: never a worse one. What a training asks for stays as it is.

    The solver's report then tells the objective of the plan as it has become.
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
