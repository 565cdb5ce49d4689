"""Plans by solvers, from the two forms of the problem as a mixed-integer programme.

    problem ──> one space for each setting ──> StageProgramme ──> Pyomo model ──> solver ──> path ──> plan
                 (the exact search's)                                        (stage form)
    problem ──────────────────────────> ChainProgramme ──> Pyomo model ──> solver ──> cuts, setting ──> plan
                                                                             (chain form)

A `Form` says how a programme becomes a Pyomo model and how a solved model is read. `solve` runs one solver on it, here
or in a process of its own, and returns what was found with the bound that was proved: infinity if the solver proved
that there is nothing, minus infinity if it proved nothing at all. `with_best_sync` then compares all ways to
synchronise for the plan, not only those searched with.
"""

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import numpy as np
import pyomo.environ as pyo
from pyomo.contrib.solver.common.factory import SolverFactory
from pyomo.contrib.solver.common.results import SolutionStatus, TerminationCondition

from funcpipe.core import Optimality, Plan, ScheduleKind, Streams, Sync
from funcpipe.errors import FuncPipeError, Infeasible, PlanError, SolverUnavailable
from funcpipe.partitioner.cost.evaluate import check_memory, check_objects, evaluate
from funcpipe.partitioner.cost.sync_choice import candidates
from funcpipe.partitioner.mip.chain_form import build_chain_model, chain_programme, read_chain
from funcpipe.partitioner.mip.stage_form import StageProgramme, build_model, read_choices
from funcpipe.partitioner.problem.goal import Goal
from funcpipe.partitioner.problem.problem import Problem, report
from funcpipe.partitioner.search.exact import explain_infeasible
from funcpipe.partitioner.search.initial_bounds import InitialBounds, initial_bounds
from funcpipe.partitioner.search.option_network import path_costs
from funcpipe.partitioner.search.spaces import Space, exact_spaces, spaces, with_stage_counts


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


RELATIVE_GAP = 1e-7
"""The gap at which a solver may stop."""
GRACE_S = 10.0
"""How long a solver may overrun its time limit before its process is killed."""

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """A solver as Pyomo knows it; `linear` if it refuses products, `alone` if it needs a process of its own."""

    name: str
    interface: str
    package: str
    linear: bool = False
    alone: bool = False
    options: tuple[tuple[str, float], ...] = ()


HIGHS = Solver(
    name="highs",
    interface="highs",
    package="highspy",
    linear=True,
    options=(("primal_feasibility_tolerance", 1e-9), ("mip_feasibility_tolerance", 1e-9), ("mip_abs_gap", 0.0)),
)
SCIP = Solver(
    name="scip",
    interface="scip_direct",
    package="pyscipopt",
    alone=True,  # it has been seen to overrun its time limit many times over
    options=(("numerics/feastol", 1e-9), ("limits/absgap", 0.0)),
)
GUROBI = Solver(
    name="gurobi",
    interface="gurobi_direct_minlp",
    package="gurobipy",
    options=(("FeasibilityTol", 1e-9), ("IntFeasTol", 1e-9), ("MIPGapAbs", 0.0)),
)


@dataclass(frozen=True, slots=True)
class Form(Generic[P, R]):
    """A way to write a programme: how its model is built, linear or not, and how a solved model is read."""

    build: Callable[[P, bool], pyo.ConcreteModel]
    read: Callable[[pyo.ConcreteModel, P], R]


@dataclass(frozen=True, slots=True)
class Solved(Generic[R]):
    """A solver's find, if there is one, and the bound that it proved, in the model's unit."""

    found: R | None
    bound: float


def solve(form: Form[P, R], programme: P, solver: Solver, time_limit_s: float | None) -> Solved[R]:
    """Solve one programme; an infeasible one has the bound infinity.

    A solver that does not keep its time limit runs in a process of its own and is killed. Raises SolverUnavailable.
    """
    if not solver.alone:
        return _solve_here(form, programme, solver, time_limit_s)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(there, form, programme, solver, time_limit_s), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(None if time_limit_s is None else time_limit_s + GRACE_S):
            return Solved(None, -math.inf)
        answer: Solved[R] | FuncPipeError = here.recv()
    except EOFError:
        raise FuncPipeError(f"the solver {solver.name} ended without an answer") from None
    finally:
        process.kill()
        process.join()
    if isinstance(answer, FuncPipeError):
        raise answer
    return answer


def _child(
    channel: Connection, form: Form[Any, Any], programme: object, solver: Solver, time_limit_s: float | None
) -> None:
    try:
        channel.send(_solve_here(form, programme, solver, time_limit_s))
    except FuncPipeError as error:
        channel.send(error)


def _solve_here(form: Form[P, R], programme: P, solver: Solver, time_limit_s: float | None) -> Solved[R]:
    instance = SolverFactory(solver.interface)
    if not instance.available():
        raise SolverUnavailable(f"the solver {solver.name} is not installed; try pip install {solver.package}")
    m = form.build(programme, solver.linear)
    options = {"time_limit": time_limit_s, "rel_gap": RELATIVE_GAP, "solver_options": dict(solver.options)}
    try:
        result = instance.solve(m, load_solutions=False, raise_exception_on_nonoptimal_result=False, **options)
    except Exception as error:
        if "license" not in str(error).lower():
            raise
        count = sum(1 for _ in m.component_data_objects(pyo.Var))
        raise SolverUnavailable(
            f"the licence of {solver.name} does not admit a programme of {count} variables ({error}); "
            "merge layers, offer fewer sizes, or use another solver"
        ) from error
    ended = result.termination_condition
    if ended in (TerminationCondition.provenInfeasible, TerminationCondition.infeasibleOrUnbounded):
        return Solved(None, math.inf)
    if ended not in (TerminationCondition.convergenceCriteriaSatisfied, TerminationCondition.maxTimeLimit):
        raise FuncPipeError(f"the solver {solver.name} ended with {ended.name}")
    bound = -math.inf if result.objective_bound is None else float(result.objective_bound)
    if result.solution_status not in (SolutionStatus.optimal, SolutionStatus.feasible):
        return Solved(None, bound)
    result.solution_loader.load_vars()
    return Solved(form.read(m, programme), bound)


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
    """The seconds that a solver may take: a tenth of a second at least, since some refuse 0."""
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
