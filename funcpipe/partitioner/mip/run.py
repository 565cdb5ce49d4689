"""Handing a programme to a solver, and reading how it ended.

A `Form` says how a programme becomes a Pyomo model and how a solved model is read. `solve` runs one solver on it, here
or in a process of its own, and returns what was found with the bound that was proved: infinity if the solver proved
that there is nothing, minus infinity if it proved nothing at all.
"""

import math
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import pyomo.environ as pyo
from pyomo.contrib.solver.common.factory import SolverFactory
from pyomo.contrib.solver.common.results import SolutionStatus, TerminationCondition

from funcpipe.errors import FuncPipeError, SolverUnavailable

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
    """What a solver found, if anything, and the bound that it proved, in the model's unit."""

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
