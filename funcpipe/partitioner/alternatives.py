"""Other plans to set beside the best one: the second best, the Pareto front, and the best if things were different.

The front holds exactly those plans that no other plan beats in both time and money. What if: faster links, more
expensive functions, fewer sizes, or another model.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from funcpipe.core import (
    NO_PINS,
    Estimate,
    ModelProfile,
    Optimality,
    Pins,
    Plan,
    PlanRequest,
    PlatformSpec,
    TrainingSpec,
)
from funcpipe.core.distribution import needed_from
from funcpipe.core.json_form import IF_CHANGED
from funcpipe.core.rounds import AUTO
from funcpipe.errors import Infeasible, InvalidValue, PlanError
from funcpipe.partitioner import PLANNED_LAYERS
from funcpipe.partitioner.cost import BoolArray
from funcpipe.partitioner.cost.evaluate import check_memory, evaluate
from funcpipe.partitioner.cost.loads import Setting
from funcpipe.partitioner.local_steps import RoundChoice, round_choices
from funcpipe.partitioner.optimize import merged_problem, optimize, unmerged, with_origin
from funcpipe.partitioner.problem.goal import Goal
from funcpipe.partitioner.problem.options import Options
from funcpipe.partitioner.problem.problem import Problem, StageChoice
from funcpipe.partitioner.problem.stage_graph import StageGraph
from funcpipe.partitioner.search.exact import explain_infeasible, time_limit
from funcpipe.partitioner.search.incumbents import Cheapest, Found, ParetoPlans, incumbents_for
from funcpipe.partitioner.search.search import Search
from funcpipe.partitioner.search.spaces import Space, spaces
from funcpipe.partitioner.stores import in_stores, store_choices, with_checkpoints


def second_best(problem: Problem, plan: Plan) -> Plan | None:
    """The best plan other than `plan`, exactly; None if there is no other.

    Any other plan either has another setting, or begins with the first stages of `plan`, however many, and continues
    with a different one. All these sets of plans are searched together.
    """
    search = Search(problem, incumbents_for(problem.goal), among=_others(problem, plan))
    search.run()
    return search.found[-1].plan(problem) if search.found else None


def choices_of(problem: Problem, plan: Plan) -> list[StageChoice]:
    """The stages of `plan` as choices."""
    names = [size.name for size in problem.spec.sizes]
    return [StageChoice(stage.first, stage.stop, names.index(stage.size), stage.recompute) for stage in plan.stages]


def _others(problem: Problem, plan: Plan) -> Iterator[Space]:
    graph = problem.stage_graph
    choices = choices_of(problem, plan)

    def same(setting: Setting) -> bool:
        return (setting.replicas, setting.schedule) == (plan.replicas, plan.schedule)

    def other_setting(setting: Setting, options: Options) -> BoolArray:
        return np.full(len(options), not same(setting))

    yield from spaces(problem, graph, other_setting)
    for same_stages in range(len(choices)):

        def other_stage(setting: Setting, options: Options, same_stages: int = same_stages) -> BoolArray:
            if not same(setting):
                return np.zeros(len(options), dtype=bool)
            return _branches_off(graph, options, choices[: same_stages + 1])

        yield from spaces(problem, graph, other_stage)


def _branches_off(graph: StageGraph, options: Options, choices: Sequence[StageChoice]) -> BoolArray:
    """The options of plans that begin with all of `choices` except the last one, and continue with another stage."""
    first = graph.first[options.edge]
    *shared, other = choices
    kept: BoolArray = first > other.first
    kept |= (first == other.first) & ~_is(graph, options, other)
    for choice in shared:
        kept |= _is(graph, options, choice)
    return kept


def _is(graph: StageGraph, options: Options, choice: StageChoice) -> BoolArray:
    same_layers = (graph.first[options.edge] == choice.first) & (graph.stop[options.edge] == choice.stop)
    result: BoolArray = same_layers & (options.size == choice.size) & (options.recompute == choice.recompute)
    return result


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
    if training.sync_every == AUTO:
        rule = "must be a number of steps, or end, for a Pareto front, whose plans meet equally often"
        raise InvalidValue("sync_every", AUTO, rule)
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


def plot_front(front: Front, path: str | Path) -> None:
    """Draw `front` into the file `path`, its kind after the ending: seconds across, dollars up, marked plans named.

    Needs matplotlib, which is imported only here.
    """
    with needed_from("figures"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    points = [(p.estimate.iteration_s, p.estimate.cost_usd) for p in front.plans if p.estimate is not None]
    axes.plot(*zip(*points, strict=True), marker=".", drawstyle="steps-post", linewidth=1, label="Pareto front")
    for name, place in front.marked.items():
        axes.plot(*points[place], marker="o", linestyle="none", label=f"best for a weight of {name} MB·s per second")
    axes.plot(*points[front.recommended], marker="*", markersize=14, linestyle="none", label="recommended")
    axes.set_xlabel("seconds per iteration")
    axes.set_ylabel("dollars per iteration")
    axes.set_title(f"{front.model} on {front.platform}, batch {front.global_batch}")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


class Planner(Protocol):
    """Finds a plan for a profile, a platform and a training, as `optimize` does."""

    def __call__(self, profile: ModelProfile, spec: PlatformSpec, training: TrainingSpec, /) -> Plan:
        """The plan; raises Infeasible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """How another platform differs: bandwidth and prices by a factor, the rest by new values; None changes nothing.

    `price` multiplies the prices of functions, `request_price` those of requests to all stores, and of their bytes and
    hours; `latency_s` and `shared_bytes_s` are those of the default store.
    """

    bandwidth: float = 1.0
    price: float = 1.0
    request_price: float = 1.0
    latency_s: float | None = None
    contention: float | None = None
    shared_bytes_s: float | None = None
    sizes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth", "price", "request_price"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name == "bandwidth"):
                raise InvalidValue(name, value, "must be a factor above 0")

    def apply(self, spec: PlatformSpec) -> PlatformSpec:
        """The other platform. Raises InvalidValue for sizes that `spec` does not have."""
        names = (
            [size.name for size in spec.sizes] if self.sizes is None else [spec.size(name).name for name in self.sizes]
        )
        empty = spec.price_empty_get_usd  # None, or 0, stays
        given = {name: getattr(self, name) for name in ("latency_s", "contention", "shared_bytes_s")}
        return replace(
            spec,
            name=f"{spec.name}, changed",
            sizes=tuple(
                replace(
                    size,
                    upload_bytes_s=size.upload_bytes_s * self.bandwidth,
                    download_bytes_s=size.download_bytes_s * self.bandwidth,
                    price_usd_s=size.price_usd_s * self.price,
                )
                for size in spec.sizes
                if size.name in names
            ),
            price_put_usd=spec.price_put_usd * self.request_price,
            price_get_usd=spec.price_get_usd * self.request_price,
            price_empty_get_usd=empty and empty * self.request_price,
            stores=tuple(store.times(self.request_price) for store in spec.stores),
            **{name: value for name, value in given.items() if value is not None},
        )


def parse_changes(items: Sequence[str]) -> Changes:
    """Changes written as `bandwidth=2x`, `price=0.8x`, `request_price=2x`, `latency_s=0.01`, `contention=1.2`,
    `shared_bytes_s=1e9`, `sizes=1024MB,2048MB`. Raises InvalidValue.
    """
    values: dict[str, float | tuple[str, ...]] = {}
    known = Changes.__dataclass_fields__
    for item in items:
        name, _, text = item.partition("=")
        if name not in known or not text:
            raise InvalidValue("what-if", item, f"must be NAME=VALUE with one of {', '.join(known)}")
        factor = name in ("bandwidth", "price", "request_price")
        try:
            values[name] = (
                tuple(text.split(",")) if name == "sizes" else float(text.removesuffix("x") if factor else text)
            )
        except ValueError:
            raise InvalidValue(name, text, "must be a number") from None
    return Changes(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The best plan as things are, what that plan would take after the changes, and the best plan then; for some
    numbers of steps between meetings, where that is left open, as `rounds`.

    `now` is None where there is no plan as things are; `kept` is None where that plan cannot be kept, and `obstacle`
    says why.
    """

    FORMAT: ClassVar[str] = "funcpipe.what-if/1"

    now: Plan | None
    kept: Estimate | None
    obstacle: str | None
    best: Plan
    rounds: tuple[RoundChoice, ...] = field(default=(), metadata=IF_CHANGED)


def what_if(
    profile: ModelProfile,
    spec: PlatformSpec,
    training: TrainingSpec,
    changes: Changes,
    *,
    other_profile: ModelProfile | None = None,
    find: Planner = optimize,
) -> WhatIf:
    """Plan by `find` for `spec` as it is and with `changes`, the latter for `other_profile`, if one is given.

    Raises what `find` raises where there is no plan after the changes.
    """
    other_spec, other_profile = changes.apply(spec), other_profile or profile
    best = find(other_profile, other_spec, training)
    rounds = round_choices(other_profile, other_spec, training, find)
    try:
        now = find(profile, spec, training)
    except Infeasible as error:
        return WhatIf(now=None, kept=None, obstacle=str(error), best=best, rounds=rounds)
    try:
        kept = evaluate(now, other_profile, other_spec)
        check_memory(now, kept)
    except PlanError as error:
        return WhatIf(now=now, kept=None, obstacle=str(error), best=best, rounds=rounds)
    return WhatIf(now=now, kept=kept, obstacle=None, best=best, rounds=rounds)
