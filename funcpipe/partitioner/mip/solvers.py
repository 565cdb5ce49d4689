"""Plans by solvers, from the two forms of the problem as a mixed-integer programme."""

import math
import time
from collections.abc import Iterator

import numpy as np

from funcpipe.core import Plan, ScheduleKind
from funcpipe.errors import Infeasible, SolverUnavailable
from funcpipe.partitioner.mip.chain_form import build_chain_model, chain_programme, read_chain
from funcpipe.partitioner.mip.run import GUROBI, HIGHS, SCIP, Form, Solver, solve
from funcpipe.partitioner.mip.stage_form import StageProgramme, build_model, read_choices
from funcpipe.partitioner.problem.best_sync import with_best_sync
from funcpipe.partitioner.problem.goal import Goal
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.problem.report import report
from funcpipe.partitioner.search.infeasible import explain_infeasible
from funcpipe.partitioner.search.initial_bounds import InitialBounds, initial_bounds
from funcpipe.partitioner.search.option_network import path_costs
from funcpipe.partitioner.search.spaces import Space, exact_spaces, spaces, with_stage_counts

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


def paper(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """The best plan of a chain by the programme in the paper's own variables, by Gurobi where it will do, or SCIP.

    Raises Infeasible, SolverUnavailable, and InvalidValue for what that programme cannot express.
    """
    try:
        return chain_form(problem, GUROBI, time_limit_s=time_limit_s)
    except SolverUnavailable:
        return chain_form(problem, SCIP, time_limit_s=time_limit_s)


def _stage_form(problem: Problem, solver: Solver, time_limit_s: float | None) -> Plan:
    """The best plan over all settings, each of which is a programme of its own."""
    started_s, goal = time.monotonic(), problem.goal
    best, best_objective, bound = None, math.inf, math.inf
    for space in _spaces(problem):
        programme = programme_of(space, goal, best_objective)
        if programme is None:
            continue
        solved = solve(STAGE_FORM, programme, solver, _time_left_s(started_s, time_limit_s))
        bound = min(bound, solved.bound * (1.0 if goal.counts_seconds else programme.unit_usd))
        if solved.found is not None:
            plan = problem.plan(space.setting, solved.found)
            if goal.of_plan(plan) < best_objective:
                best, best_objective = plan, goal.of_plan(plan)
    if best is None:
        raise _nothing_found(problem, bound)
    spent_s = time.monotonic() - started_s
    best = report(best, problem, name=solver.name, bound=min(bound, best_objective), solve_s=spent_s, one_way=True)
    return with_best_sync(best, problem)


def _spaces(problem: Problem) -> Iterator[Space]:
    """Spaces in which all stages synchronise in one way: options that have a choice of ways would be too many."""
    return exact_spaces(spaces(problem, problem.stage_graph, settings=problem.one_way_settings()))


def chain_form(problem: Problem, solver: Solver, *, time_limit_s: float | None = None) -> Plan:
    """The best plan of a chain by the programme in the paper's own variables; raises what `paper` raises."""
    started_s, goal = time.monotonic(), problem.goal
    looked_at = [(space, initial_bounds(space.network)) for space in _spaces(problem)]
    possible = [(space, bounds) for space, bounds in looked_at if bounds is not None]
    if not possible:
        raise explain_infeasible(problem)
    known = min(_best_of(space, bounds, goal) for space, bounds in possible)
    longest_s = min(goal.deadline_s, max(_longest_s(bounds, goal, known) for _, bounds in possible))
    unit_usd = _unit_usd(possible[0][0], goal, known, longest_s)
    programme = chain_programme(problem, longest_s=longest_s, unit_usd=unit_usd)
    solved = solve(CHAIN_FORM, programme, solver, _time_left_s(started_s, time_limit_s))
    if solved.found is None:
        raise _nothing_found(problem, solved.bound)
    plan = problem.plan(*solved.found)
    bound = min(goal.of_plan(plan), solved.bound * (1.0 if goal.counts_seconds else programme.unit_usd))
    spent_s = time.monotonic() - started_s
    plan = report(plan, problem, name=f"{solver.name} (paper)", bound=bound, solve_s=spent_s, one_way=True)
    return with_best_sync(plan, problem)


def _time_left_s(started_s: float, time_limit_s: float | None) -> float | None:
    """What a solver may take of the time limit: a tenth of a second at least, since some refuse 0."""
    return None if time_limit_s is None else max(0.1, time_limit_s - (time.monotonic() - started_s))


def _nothing_found(problem: Problem, bound: float) -> Infeasible:
    """The error where no solver found a plan: if all proved that there is none, the bound is infinite."""
    return explain_infeasible(problem) if bound == math.inf else Infeasible("no plan was found within the time limit")


def programme_of(space: Space, goal: Goal, best: float) -> StageProgramme | None:
    """The programme of a space, given the best objective known; None if nothing better can be in it."""
    bounds = initial_bounds(space.network)
    if bounds is None:
        return None
    known = min(best, _best_of(space, bounds, goal))
    longest_s = min(goal.deadline_s, _longest_s(bounds, goal, known))
    if longest_s < bounds.fastest_s * (1 - 1e-9):
        return None
    plain = space.setting.schedule is ScheduleKind.GPIPE
    return StageProgramme(
        graph=space.graph,
        network=space.network if plain else with_stage_counts(space, space.network),
        goal=goal,
        fewest=space.fewest,
        most=space.most,
        longest_s=longest_s,
        unit_usd=_unit_usd(space, goal, known, longest_s),
    )


def _best_of(space: Space, bounds: InitialBounds, goal: Goal) -> float:
    """The best objective of the plans found in a first look at the space."""
    costs = path_costs(space.network, bounds.paths, np.zeros_like(bounds.paths))
    objectives = goal.objective(costs.plan.iteration_s, costs.plan.cost_usd)
    return float(objectives[space.admits(costs)].min(initial=math.inf))


def _longest_s(bounds: InitialBounds, goal: Goal, known: float) -> float:
    """No plan better than one with the objective `known` takes longer."""
    if goal.counts_seconds:
        return min(known, bounds.slowest_s)
    usd_s = bounds.least_price_usd_s + goal.time_value_usd_s
    return min(known / usd_s if usd_s > 0 else math.inf, bounds.slowest_s) * (1 + 1e-6)


def _unit_usd(space: Space, goal: Goal, known: float, longest_s: float) -> float:
    """A hundredth of the dollars at stake: what a solver sees as 1, so that its tolerances mean something."""
    candidates = [goal.budget_usd, math.inf if goal.counts_seconds else known]
    typical = float(space.options.costs.price_usd_s.mean()) * longest_s
    return max(next((usd for usd in candidates if math.isfinite(usd)), typical), 1e-12) / 100
