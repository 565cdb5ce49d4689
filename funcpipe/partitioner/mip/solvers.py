"""Plans by the solvers that take the mixed-integer programmes."""

import math
import time

from funcpipe.core import Plan, ScheduleKind
from funcpipe.errors import Infeasible, SolverUnavailable
from funcpipe.partitioner.mip.chain_form import build_chain_model, chain_programme, read_chain
from funcpipe.partitioner.mip.run import GUROBI, HIGHS, SCIP, Form, Solver, solve
from funcpipe.partitioner.mip.stage_form import Programme, build_model, read_choices
from funcpipe.partitioner.problem.problem import Goal, Problem, report
from funcpipe.partitioner.problem.stage_graph import build_stage_graph
from funcpipe.partitioner.search.infeasible import explain_infeasible
from funcpipe.partitioner.search.initial_bounds import InitialBounds, initial_bounds
from funcpipe.partitioner.search.option_network import total
from funcpipe.partitioner.search.spaces import Space, counted, spaces

STAGE_FORM = Form(build_model, read_choices)
CHAIN_FORM = Form(build_chain_model, read_chain)


def highs(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """The best plan by HiGHS, on the linearised programme. Raises Infeasible and SolverUnavailable."""
    return _stage_form(problem, HIGHS, time_limit_s)


def scip(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """The best plan by SCIP, on the quadratic programme. Raises Infeasible and SolverUnavailable."""
    return _stage_form(problem, SCIP, time_limit_s)


def gurobi(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """The best plan by Gurobi, on the quadratic programme. Raises Infeasible and SolverUnavailable.

    The licence that comes with the package admits 200 variables only where there are products.
    """
    return _stage_form(problem, GUROBI, time_limit_s)


def mip(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """The best plan by the first solver that is installed and licensed for a programme of this size."""
    for solve_with in (gurobi, scip):
        try:
            return solve_with(problem, time_limit_s=time_limit_s)
        except SolverUnavailable:
            continue
    return highs(problem, time_limit_s=time_limit_s)


def _stage_form(problem: Problem, solver: Solver, time_limit_s: float | None) -> Plan:
    """The best plan over all settings, each a programme of its own."""
    started_s, goal = time.monotonic(), problem.goal
    graph = build_stage_graph(problem.profile, admits=problem.placed.admits)
    best, best_objective, bound = None, math.inf, math.inf
    for space in spaces(problem, graph):
        programme = programme_of(space, goal, best_objective)
        if programme is None:
            continue
        left_s = None if time_limit_s is None else max(0.1, time_limit_s - (time.monotonic() - started_s))
        solved = solve(STAGE_FORM, programme, solver, left_s)
        bound = min(bound, solved.bound * (1.0 if goal.counts_seconds else programme.unit_usd))
        if solved.found is not None:
            plan = problem.plan(space.setting, solved.found)
            if goal.of_plan(plan) < best_objective:
                best, best_objective = plan, goal.of_plan(plan)
    if best is None:
        raise (
            explain_infeasible(problem) if bound == math.inf else Infeasible("no plan was found within the time limit")
        )
    return report(best, goal, name=solver.name, bound=min(bound, best_objective), solve_s=time.monotonic() - started_s)


def chain_form(problem: Problem, solver: Solver, *, time_limit_s: float | None = None) -> Plan:
    """The best plan of a chain by the programme in the paper's own variables, by Gurobi or SCIP.

    Raises Infeasible, SolverUnavailable, and InvalidValue for what that programme cannot say.
    """
    started_s, goal = time.monotonic(), problem.goal
    swept = [(space, initial_bounds(space.field)) for space in spaces(problem, build_stage_graph(problem.profile))]
    looks = [(space, look) for space, look in swept if look is not None]
    if not looks:
        raise explain_infeasible(problem)
    known = min(_best_of(space, look, goal) for space, look in looks)
    longest_s = min(goal.deadline_s, max(_longest_s(look, goal, known) for _, look in looks))
    programme = chain_programme(problem, longest_s=longest_s, unit_usd=_unit_usd(looks[0][0], goal, known, longest_s))
    solved = solve(CHAIN_FORM, programme, solver, time_limit_s)
    if solved.found is None:
        raise (
            explain_infeasible(problem) if solved.bound == math.inf else Infeasible("no plan was found within the time")
        )
    plan = problem.plan(*solved.found)
    bound = min(goal.of_plan(plan), solved.bound * (1.0 if goal.counts_seconds else programme.unit_usd))
    return report(plan, goal, name=f"{solver.name} (paper)", bound=bound, solve_s=time.monotonic() - started_s)


def programme_of(space: Space, goal: Goal, best: float) -> Programme | None:
    """The programme of a space, given the best objective known; None if nothing better can be in it."""
    look = initial_bounds(space.field)
    if look is None:
        return None
    known = min(best, _best_of(space, look, goal))
    longest_s = min(goal.deadline_s, _longest_s(look, goal, known))
    if longest_s < look.fastest_s * (1 - 1e-9):
        return None
    plain = space.setting.schedule is ScheduleKind.GPIPE
    return Programme(
        graph=space.graph,
        field=space.field if plain else counted(space, space.field),
        goal=goal,
        fewest=space.fewest,
        most=space.most,
        longest_s=longest_s,
        unit_usd=_unit_usd(space, goal, known, longest_s),
    )


def _best_of(space: Space, look: InitialBounds, goal: Goal) -> float:
    """The best objective of the plans that a first look at the space has come across."""
    totals = total(space.field, look.paths)
    fitting = totals.fits & (totals.stages >= space.fewest) & (totals.stages <= space.most)
    return float(goal.objective(totals.iteration_s, totals.cost_usd)[fitting].min(initial=math.inf))


def _longest_s(look: InitialBounds, goal: Goal, known: float) -> float:
    """No plan better than one of the objective `known` takes longer."""
    if goal.counts_seconds:
        return min(known, look.slowest_s)
    dollars_s = look.least_price_usd_s + goal.time_value_usd_s
    return min(known / dollars_s if dollars_s > 0 else math.inf, look.slowest_s) * (1 + 1e-6)


def _unit_usd(space: Space, goal: Goal, known: float, longest_s: float) -> float:
    """A hundredth of the dollars that are at stake."""
    dollars = [goal.budget_usd, math.inf if goal.counts_seconds else known]
    usual = float(space.options.price_usd_s.mean()) * longest_s
    return max(next((some for some in dollars if math.isfinite(some)), usual), 1e-12) / 100
