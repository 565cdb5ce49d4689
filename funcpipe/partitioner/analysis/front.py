"""The Pareto front of a problem: exactly those plans that no other plan beats in both time and money."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from funcpipe.core import NO_PINS, ModelProfile, Optimality, Pins, Plan, PlanRequest, PlatformSpec, TrainingSpec
from funcpipe.errors import Infeasible, InvalidValue
from funcpipe.partitioner.catalog import PLANNED_LAYERS
from funcpipe.partitioner.optimize import merged_problem, unmerged, with_origin
from funcpipe.partitioner.problem.goal import Goal
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exact import time_limit
from funcpipe.partitioner.search.found import Found
from funcpipe.partitioner.search.incumbents import Cheapest, ParetoPlans
from funcpipe.partitioner.search.infeasible import explain_infeasible
from funcpipe.partitioner.search.search import Search
from funcpipe.partitioner.search.store_pairs import in_stores
from funcpipe.partitioner.stores import store_choices, with_checkpoints

USD_PER_MB_S = 0.0000166667 / 1024
"""The paper's unit of money in dollars: a megabyte of function memory for a second, on AWS Lambda."""

PAPER_WEIGHTS = {f"2^{power}" if power else "0": (2.0**power if power else 0.0) for power in (0, 16, 19, 22)}
"""The paper's weights of a second against a MB·s (FuncPipe, section 5.1)."""

WORTH_IT = 0.8
"""The paper recommends a faster plan if its speed-up is at least this share of its extra cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Plans in ascending order of time and descending order of money.

    `marked` names some of them by place: the optimum for each of the paper's weights, and `recommended`. A front of
    status 'feasible' was cut short: plans may be missing from it, and better ones may exist.
    """

    FORMAT: ClassVar[str] = "funcpipe.front/1"

    model: str
    platform: str
    global_batch: int
    status: Optimality
    solve_s: float
    plans: tuple[Plan, ...]
    marked: Mapping[str, int]
    recommended: int


def pareto_front(
    profile: ModelProfile,
    spec: PlatformSpec,
    training: TrainingSpec,
    *,
    pins: Pins = NO_PINS,
    time_limit_s: float | None = None,
    layer_limit: int = PLANNED_LAYERS,
) -> Front:
    """The front of all plans for `training`, in all stores that it allows; time value, deadline and budget are ignored.

    Raises what `optimize` raises.
    """
    started_s = time.monotonic()
    free = replace(training, time_value=0.0, deadline_s=None, budget_usd=None)
    choices = store_choices(spec, training.stores)
    problem, starts = merged_problem(profile, spec, free, pins=pins, layer_limit=layer_limit, stores=choices[0])
    problems = [in_stores(problem, stores) for stores in choices]
    found, complete = _search(problems, started_s, time_limit_s)
    checkpoints, request = training.stores.checkpoints, PlanRequest(profile=profile, spec=spec, pins=pins)
    ready = [with_checkpoints(some.plan(own), own, checkpoints) for own, some in found]
    plans = tuple(with_origin(unmerged(plan, starts), training, request) for plan in ready)
    points = [(some.iteration_s, some.cost_usd) for _, some in found]
    return Front(
        model=profile.model,
        platform=spec.name,
        global_batch=training.global_batch,
        status=Optimality.OPTIMAL if complete else Optimality.FEASIBLE,
        solve_s=time.monotonic() - started_s,
        plans=plans,
        marked={name: best_point(points, weight * USD_PER_MB_S) for name, weight in PAPER_WEIGHTS.items()},
        recommended=recommended_point(points),
    )


def best_point(points: Sequence[tuple[float, float]], time_value_usd_s: float) -> int:
    """The place of the point (seconds, dollars) with the least dollars, where a second is worth `time_value_usd_s`."""
    return min(range(len(points)), key=lambda i: points[i][1] + time_value_usd_s * points[i][0])


def recommended_point(points: Sequence[tuple[float, float]]) -> int:
    """The paper's choice: the fastest point whose speed-up over the cheapest is worth its extra cost.

    Compared to the cheapest point, its speed-up is at least 0.8 of its extra cost, both as shares (FuncPipe, section
    5.1). The cheapest point if there is none, or if it is free. Raises InvalidValue for no points.
    """
    if not points:
        raise InvalidValue("points", points, "must not be empty")
    cheapest = min(range(len(points)), key=lambda i: (points[i][1], points[i][0]))
    seconds, dollars = points[cheapest]
    worth = [
        i
        for i, (s, c) in enumerate(points)
        if i == cheapest or (c > dollars > 0 and (seconds / s - 1) / (c / dollars - 1) >= WORTH_IT)
    ]
    return min(worth, key=lambda i: points[i][0])


def _search(
    problems: Sequence[Problem], started_s: float, time_limit_s: float | None
) -> tuple[list[tuple[Problem, Found]], bool]:
    """The plans of the front in ascending order of time, each with its problem, and whether it is all of it."""
    time_is_up = time_limit(started_s, time_limit_s)
    cheapest, complete = Cheapest(Goal(deadline_s=problems[0].goal.deadline_s)), True
    latest_s = math.inf
    for problem in problems:
        cheap = Search(problem, cheapest, time_is_up)
        cheap.run()
        complete &= cheap.complete
        latest_s = cheap.found[-1].iteration_s if cheap.found else latest_s
    if latest_s == math.inf:
        raise explain_infeasible(problems[0])
    best = ParetoPlans(latest_s=latest_s * (1 + 1e-9))
    found: list[tuple[Problem, Found]] = []
    for problem in problems:
        search = Search(problem, best, time_is_up)
        search.found = [some for _, some in found]  # so that time may be up before it finds any itself
        known = len(search.found)
        search.run()
        complete &= search.complete
        found += [(problem, some) for some in search.found[known:]]
    if not found:
        raise Infeasible("no plan was found within the time limit")
    undominated = set(zip(best.seconds, best.dollars, strict=True))
    on_front = {(some.iteration_s, some.cost_usd): (problem, some) for problem, some in found}
    return [on_front[point] for point in sorted(undominated)], complete
