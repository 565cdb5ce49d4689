"""The exact search: the best plan with proof, or the best plan so far with a bound. It needs no solver."""

import math
import time
from collections.abc import Callable, Iterable

from funcpipe.core import Plan
from funcpipe.partitioner.problem.problem import Problem, report
from funcpipe.partitioner.search.incumbents import incumbents_for
from funcpipe.partitioner.search.infeasible import explain_infeasible
from funcpipe.partitioner.search.search import Search
from funcpipe.partitioner.search.spaces import Space

Clock = Callable[[], float]
"""Seconds since some point in the past, such as `time.monotonic`."""


def exact(problem: Problem, *, time_limit_s: float | None = None, clock: Clock = time.monotonic) -> Plan:
    """The best plan; raises Infeasible when there is none.

    After `time_limit_s` seconds by `clock` the best plan so far is returned, with the bound that is proved by then. If
    no plan has been found yet, the search continues until there is one.
    """
    return best_plans(problem, 1, time_limit_s=time_limit_s, clock=clock)[0]


def best_plans(
    problem: Problem, count: int, *, time_limit_s: float | None = None, clock: Clock = time.monotonic
) -> list[Plan]:
    """The plan of `exact`, and the best other ones that the search met, at most `count` in all, best first.

    They differ in cuts, replicas or schedule. Only of the first one anything is proved.
    """
    started_s = clock()
    search = search_below(problem, math.inf, time_limit(started_s, time_limit_s, clock))
    if not search.found:
        raise explain_infeasible(problem)
    best = search.found[-1].plan(problem)
    plans = [report(best, problem, name="exact", bound=search.bound, solve_s=clock() - started_s)]
    others = [*search.found[:-1], *search.closest.values()] if count > 1 else []
    for found in sorted(others, key=lambda found: found.objective(problem.goal)):
        plan = found.plan(problem)
        if len(plans) < count and _shape(plan) not in map(_shape, plans):
            plans.append(report(plan, problem, name="exact", bound=None, solve_s=clock() - started_s))
    return plans


def _shape(plan: Plan) -> tuple[object, ...]:
    return plan.replicas, plan.schedule, [(stage.first, stage.stop) for stage in plan.stages]


def search_below(
    problem: Problem, cutoff: float, time_is_up: Callable[[], bool], among: Iterable[Space] | None = None
) -> Search:
    """The search, when it has run, for the best plan whose objective is below `cutoff`; infinite: for any.

    It looks into the spaces `among`, or into all.
    """
    search = Search(problem, incumbents_for(problem.goal, cutoff), time_is_up, among=among)
    search.run()
    return search


def time_limit(started_s: float, limit_s: float | None, clock: Clock = time.monotonic) -> Callable[[], bool]:
    """A function that says whether `limit_s` seconds have passed since `started_s`; never for None."""
    if limit_s is None:
        return lambda: False
    return lambda: clock() - started_s > limit_s
