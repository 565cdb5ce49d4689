"""The exact search: the best plan with proof, or the best plan so far with a bound. No solver needed."""

import time
from collections.abc import Callable

from funcpipe.core import Plan
from funcpipe.partitioner.problem.problem import Problem, report
from funcpipe.partitioner.search.infeasible import explain_infeasible
from funcpipe.partitioner.search.search import Search, aim_of


def exact(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
    """The best plan; raises Infeasible when there is none.

    After `time_limit_s` seconds the best plan so far is returned with the bound proved until then; if there is none
    yet, the search goes on until there is.
    """
    started_s = time.monotonic()
    search = Search(problem, aim_of(problem.goal), clock(started_s, time_limit_s))
    search.run()
    if not search.found:
        raise explain_infeasible(problem)
    plan = search.found[-1].plan(problem)
    return report(plan, problem.goal, name="exact", bound=search.bound, solve_s=time.monotonic() - started_s)


def clock(started_s: float, time_limit_s: float | None) -> Callable[[], bool]:
    """Whether time is up."""
    if time_limit_s is None:
        return lambda: False
    return lambda: time.monotonic() - started_s > time_limit_s
