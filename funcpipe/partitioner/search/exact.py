"""The exact search: the best plan with proof, or the best plan so far with a bound. It needs no solver."""

import math
import time
from collections.abc import Callable

from funcpipe.core import Plan
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.problem.report import report
from funcpipe.partitioner.search.incumbents import incumbents_for
from funcpipe.partitioner.search.infeasible import explain_infeasible
from funcpipe.partitioner.search.search import Search

Clock = Callable[[], float]
"""Seconds since some point in the past, such as `time.monotonic`."""


def exact(problem: Problem, *, time_limit_s: float | None = None, clock: Clock = time.monotonic) -> Plan:
    """The best plan; raises Infeasible when there is none.

    After `time_limit_s` seconds by `clock` the best plan so far is returned, with the bound that is proved by then. If
    no plan has been found yet, the search continues until there is one.
    """
    started_s = clock()
    search = search_below(problem, math.inf, time_limit(started_s, time_limit_s, clock))
    if not search.found:
        raise explain_infeasible(problem)
    plan = search.found[-1].plan(problem)
    return report(plan, problem, name="exact", bound=search.bound, solve_s=clock() - started_s)


def search_below(problem: Problem, cutoff: float, time_is_up: Callable[[], bool]) -> Search:
    """The search, when it has run, for the best plan whose objective is below `cutoff`; infinite: for any."""
    search = Search(problem, incumbents_for(problem.goal, cutoff), time_is_up)
    search.run()
    return search


def time_limit(started_s: float, limit_s: float | None, clock: Clock = time.monotonic) -> Callable[[], bool]:
    """A function that says whether `limit_s` seconds have passed since `started_s`; never for None."""
    if limit_s is None:
        return lambda: False
    return lambda: clock() - started_s > limit_s
