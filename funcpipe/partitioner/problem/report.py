"""What a solver reports of a plan that it has found: how good it is, and what is proved about it."""

from dataclasses import replace

from funcpipe.core import Optimality, Plan, SolverReport
from funcpipe.partitioner.problem.problem import Problem

GAP_OF_A_PROOF = 1e-6
"""A plan is called optimal if its objective is proved to be within this share of the best possible one."""


def report(
    plan: Plan, problem: Problem, *, name: str, bound: float | None, solve_s: float, one_way: bool = False
) -> Plan:
    """`plan` with the report of the solver `name`, which proved that no plan of `problem` is below `bound`.

    With `one_way` the proof covers the few ways to synchronise that all stages share (`Problem.one_way_settings`).
    """
    objective = problem.goal.of_plan(plan)
    bound = None if bound is None else max(0.0, bound)  # no objective is negative, whatever a solver has proved
    gap = None if bound is None else max(0.0, (objective - bound) / objective) if objective > 0 else 0.0
    proved = gap is not None and gap <= GAP_OF_A_PROOF
    solver = SolverReport(
        name=name,
        status=Optimality.OPTIMAL if proved else Optimality.FEASIBLE,
        objective=objective,
        gap=gap,
        solve_s=solve_s,
        bound=bound,
        sync_ways=problem.compared_ways if one_way else None,
    )
    return replace(plan, solver=solver)
