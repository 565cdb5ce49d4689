"""The best plans known so far, and how good a plan must be to be worth finding.

There are three things to search for, and the search treats them in the same way:

- `Cheapest`: one plan, with the fewest dollars (time valued), within a deadline;
- `Fastest`: one plan, with the fewest seconds, within a budget;
- `ParetoPlans`: every plan that no other plan beats in both seconds and dollars.

Each gives a threshold: the dollars from which on a plan with T seconds is useless. By hand, with two Pareto plans
known, 4 s for 3 $ and 10 s for 1 $: a plan of 2 s is worth any price, one of 6 s must cost less than 3 $, one of 12 s
less than 1 $.

>>> plans = ParetoPlans(seconds=[4.0, 10.0], dollars=[3.0, 1.0])
>>> [round(float(usd), 6) for usd in plans.threshold_usd(np.array([2.0, 6.0, 12.0]))]
[inf, 3.0, 1.0]

A plan that a search has found, as the stages of a space.
"""

import bisect
import math
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from funcpipe.core import Plan
from funcpipe.partitioner.cost import Array, BoolArray, IntArray
from funcpipe.partitioner.cost.pipeline import PlanCosts
from funcpipe.partitioner.problem.goal import LIMIT_SLACK, Goal
from funcpipe.partitioner.problem.problem import Problem, StageChoice
from funcpipe.partitioner.search.spaces import Space

CLOSE = 1 - 1e-9
"""A plan is not searched for unless it is better than what is known by more than this share."""


class Incumbents(Protocol):
    """The best plans known, for one thing to search for."""

    @property
    def time_value_usd_s(self) -> float:
        """The value of a second in addition to what functions cost."""

    @property
    def slower_may_win(self) -> bool:
        """Return whether a cheaper plan may replace one that takes less time."""

    @property
    def latest_s(self) -> float:
        """A plan that takes longer is useless."""

    def threshold_usd(self, iteration_s: Array) -> Array:
        """The dollars, value of time included, from which on a plan of `iteration_s` or longer is useless."""

    def offer(self, plans: PlanCosts, allowed: BoolArray) -> IntArray:
        """Take the `allowed` ones among these plans that are better than those known; returns their numbers."""

    def priority(self, bound_usd: float, low_s: float) -> float:
        """The lowest objective that plans of at least `low_s` seconds and `bound_usd` dollars may have."""

    @property
    def best(self) -> float:
        """The lowest objective known."""


@dataclass(slots=True)
class Cheapest:
    """Fewest dollars, time valued, within a deadline."""

    goal: Goal
    best: float = math.inf
    slower_may_win: bool = True

    @property
    def time_value_usd_s(self) -> float:
        """The value of a second in addition to what functions cost."""
        return self.goal.time_value_usd_s

    @property
    def latest_s(self) -> float:
        """A plan that takes longer misses the deadline."""
        return self.goal.deadline_s * (1 + LIMIT_SLACK)

    def threshold_usd(self, iteration_s: Array) -> Array:
        """The dollars of the best plan, whatever the seconds."""
        return np.full_like(iteration_s, self.best * CLOSE)

    def offer(self, plans: PlanCosts, allowed: BoolArray) -> IntArray:
        """Take the best of these plans if it is better than the one known; returns its number."""
        number, self.best = _best(self.goal, plans, allowed, self.best)
        return number

    def priority(self, bound_usd: float, low_s: float) -> float:
        """The dollars."""
        return bound_usd


@dataclass(slots=True)
class Fastest:
    """Fewest seconds within a budget."""

    goal: Goal
    best: float = math.inf
    slower_may_win: bool = False
    time_value_usd_s: float = 0.0

    @property
    def latest_s(self) -> float:
        """A plan that takes longer is not better than the one known."""
        return self.best * CLOSE

    def threshold_usd(self, iteration_s: Array) -> Array:
        """The budget, for plans that are fast enough."""
        budget_usd = math.nextafter(self.goal.budget_usd * (1 + LIMIT_SLACK), math.inf)
        return np.where(iteration_s < self.latest_s, budget_usd, -np.inf)

    def offer(self, plans: PlanCosts, allowed: BoolArray) -> IntArray:
        """Take the best of these plans if it is better than the one known; returns its number."""
        number, self.best = _best(self.goal, plans, allowed, self.best)
        return number

    def priority(self, bound_usd: float, low_s: float) -> float:
        """The seconds."""
        return low_s


@dataclass(slots=True)
class ParetoPlans:
    """Every plan that no other beats both in seconds and in dollars: `seconds` ascending, `dollars` descending."""

    latest_s: float = math.inf
    slower_may_win: bool = False
    time_value_usd_s: float = 0.0
    best: float = math.inf
    seconds: list[float] = field(default_factory=list)
    dollars: list[float] = field(default_factory=list)

    def threshold_usd(self, iteration_s: Array) -> Array:
        """The dollars of the slowest plan known that is no slower than `iteration_s`."""
        place = np.searchsorted(np.array(self.seconds), iteration_s, side="right")
        return np.concatenate([[np.inf], self.dollars])[place] * CLOSE

    def offer(self, plans: PlanCosts, allowed: BoolArray) -> IntArray:
        """Take every plan that none beats, and drop those known that it beats; returns the numbers of those taken."""
        seconds, dollars = plans.iteration_s, plans.cost_usd
        candidates = np.flatnonzero(
            allowed & (seconds <= self.latest_s) & (dollars < self.threshold_usd(seconds / CLOSE))
        )
        order = np.lexsort((dollars[candidates], seconds[candidates]))
        taken = [number for number in candidates[order] if self._add(float(seconds[number]), float(dollars[number]))]
        return np.array(taken, dtype=np.int64)

    def priority(self, bound_usd: float, low_s: float) -> float:
        """The seconds: fast plans first."""
        return low_s

    def _add(self, seconds: float, dollars: float) -> bool:
        place = bisect.bisect_right(self.seconds, seconds / CLOSE)
        if place and self.dollars[place - 1] * CLOSE <= dollars:
            return False
        start = bisect.bisect_left(self.seconds, seconds * CLOSE)
        stop = start
        while stop < len(self.seconds) and self.dollars[stop] >= dollars:
            stop += 1
        self.seconds[start:stop], self.dollars[start:stop] = [seconds], [dollars]
        return True


def incumbents_for(goal: Goal, best: float = math.inf) -> Incumbents:
    """No plan known yet, in a search for the best one whose objective is below `best`."""
    return Fastest(goal, best) if goal.counts_seconds else Cheapest(goal, best)


def _best(goal: Goal, plans: PlanCosts, allowed: BoolArray, known: float) -> tuple[IntArray, float]:
    """The number of the plan that is better than `known`, if there is one, and the lowest objective now known."""
    objective = np.where(allowed, goal.objective(plans.iteration_s, plans.cost_usd), np.inf)
    if not objective.size or objective.min() >= known:
        return np.empty(0, dtype=np.int64), known
    return np.array([objective.argmin()]), float(objective.min())


_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Found:
    """A plan found: its space and stages, and what it takes."""

    space: Space
    choices: list[StageChoice]
    iteration_s: float
    cost_usd: float

    def objective(self, goal: Goal) -> float:
        """Its objective under `goal`."""
        return float(goal.objective(np.array(self.iteration_s), np.array(self.cost_usd)))

    def plan(self, problem: Problem) -> Plan:
        """The plan, with its estimate; of schedules that do equally well it has the simplest."""
        setting = self.space.setting
        plans = [
            problem.plan(replace(setting, schedule=schedule), self.choices)
            for schedule in problem.schedules(setting.replicas)
        ]
        chosen = next(plan for plan in plans if plan.schedule is setting.schedule)
        return next(plan for plan in plans if plan is chosen or _does_as_well(plan, chosen))


def _does_as_well(plan: Plan, other: Plan) -> bool:
    """Return whether `plan` fits its functions and takes no more than `other`."""
    assert plan.estimate is not None
    assert other.estimate is not None
    fits = not any(
        needs.lacks_bytes(stage.memory_mb) for needs, stage in zip(plan.estimate.stages, plan.stages, strict=True)
    )
    faster = plan.estimate.iteration_s <= other.estimate.iteration_s * (1 + _ROUNDING)
    return fits and faster and plan.estimate.cost_usd <= other.estimate.cost_usd * (1 + _ROUNDING)
