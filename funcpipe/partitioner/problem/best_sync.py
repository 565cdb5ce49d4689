"""The best way to synchronise for a plan that has been found: all ways are compared, not only those searched with."""

from collections.abc import Iterator
from dataclasses import replace

from funcpipe.core import Optimality, Plan, Streams, Sync
from funcpipe.errors import PlanError
from funcpipe.partitioner.cost.evaluate import check_memory, check_objects, evaluate
from funcpipe.partitioner.cost.sync_choice import candidates
from funcpipe.partitioner.problem.problem import Problem


def with_best_sync(plan: Plan, problem: Problem) -> Plan:
    """`plan` with the way to synchronise that is best for the goal, and the solver's report with its new objective.

    A way that the training asks for is kept. The solver has proved something about plans in the ways it searched with
    only: nothing is proved of a plan that is better in another way, as other cuts may be better still in that one.
    """
    if problem.training.sync is not None or plan.replicas == 1:
        return plan
    best = min([plan, *_variants(plan, problem)], key=problem.goal.of_plan)
    if best is plan or best.solver is None:
        return best
    objective = problem.goal.of_plan(best)
    unproved = replace(best.solver, objective=objective, status=Optimality.FEASIBLE, gap=None, bound=None)
    return replace(best, solver=unproved)


def _variants(plan: Plan, problem: Problem) -> Iterator[Plan]:
    ways: list[tuple[Sync, Streams | None]] = [(Sync.THREE_PHASE, None), (Sync.PIPELINED, None)]
    for sync, streams in [*ways, *candidates(plan.replicas, sharded=plan.is_sharded)]:
        variant = replace(plan, sync=sync, streams=streams)
        estimate = evaluate(variant, problem.profile, problem.spec)
        try:
            check_memory(variant, estimate)
            check_objects(variant, problem.profile, problem.spec)
        except PlanError:
            continue
        yield replace(variant, estimate=estimate)
