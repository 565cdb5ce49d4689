"""What a search is after: the plans known so far, and how dear a plan must be not to be worth finding."""

import bisect
import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from funcpipe.partitioner.cost.formulas import Array
from funcpipe.partitioner.problem.options import BoolArray
from funcpipe.partitioner.problem.problem import LIMIT_SLACK, Goal
from funcpipe.partitioner.problem.stage_graph import IntArray
from funcpipe.partitioner.search.option_network import Totals

CLOSE = 1 - 1e-9
"""Nothing is searched for that is not better than what is known by more than this share of it."""


class Aim(Protocol):
    """What is searched for."""

    @property
    def time_value_usd_s(self) -> float:
        """What a second is worth on top of what functions cost."""

    @property
    def slower_may_win(self) -> bool:
        """Whether a cheaper plan may push aside one that takes less time."""

    @property
    def latest_s(self) -> float:
        """A plan that takes longer is of no use."""

    def threshold_usd(self, iteration_s: Array) -> Array:
        """From which dollars on, value of time included, a plan that takes `iteration_s` or longer is of no use."""

    def offer(self, totals: Totals, allowed: BoolArray) -> IntArray:
        """Make known the plans with these totals; the numbers of those that are now among the best."""

    def first(self, bound_usd: float, low_s: float) -> float:
        """Where a window stands in the queue: the lowest objective that it may hold."""

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
        """What a second is worth on top of what functions cost."""
        return self.goal.time_value_usd_s

    @property
    def latest_s(self) -> float:
        """A plan that takes longer is of no use."""
        return self.goal.deadline_s * (1 + LIMIT_SLACK)

    def threshold_usd(self, iteration_s: Array) -> Array:
        """From which dollars on a plan that takes `iteration_s` or longer is of no use."""
        return np.full_like(iteration_s, self.best * CLOSE)

    def offer(self, totals: Totals, allowed: BoolArray) -> IntArray:
        """Make known the plans with these totals; the numbers of those that are now among the best."""
        number, self.best = _best(self.goal, totals, allowed, self.best)
        return number

    def first(self, bound_usd: float, low_s: float) -> float:
        """Where a window stands in the queue."""
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
        """A plan that takes longer is of no use."""
        return self.best * CLOSE

    def threshold_usd(self, iteration_s: Array) -> Array:
        """From which dollars on a plan that takes `iteration_s` or longer is of no use."""
        budget_usd = math.nextafter(self.goal.budget_usd * (1 + LIMIT_SLACK), math.inf)
        return np.where(iteration_s < self.latest_s, budget_usd, -np.inf)

    def offer(self, totals: Totals, allowed: BoolArray) -> IntArray:
        """Make known the plans with these totals; the numbers of those that are now among the best."""
        number, self.best = _best(self.goal, totals, allowed, self.best)
        return number

    def first(self, bound_usd: float, low_s: float) -> float:
        """Where a window stands in the queue."""
        return low_s


@dataclass(slots=True)
class Staircase:
    """Every plan that no other beats both in seconds and in dollars."""

    latest_s: float = math.inf
    slower_may_win: bool = False
    time_value_usd_s: float = 0.0
    best: float = math.inf
    seconds: list[float] = field(default_factory=list)
    dollars: list[float] = field(default_factory=list)

    def threshold_usd(self, iteration_s: Array) -> Array:
        """From which dollars on a plan that takes `iteration_s` or longer is of no use."""
        place = np.searchsorted(np.array(self.seconds), iteration_s, side="right")
        return np.concatenate([[np.inf], self.dollars])[place] * CLOSE

    def offer(self, totals: Totals, allowed: BoolArray) -> IntArray:
        """Make known the plans with these totals; the numbers of those that are now among the best."""
        new = []
        for number in np.lexsort((totals.cost_usd, totals.iteration_s)):
            seconds, dollars = float(totals.iteration_s[number]), float(totals.cost_usd[number])
            if allowed[number] and seconds <= self.latest_s and self._add(seconds, dollars):
                new.append(int(number))
        return np.array(new, dtype=np.int64)

    def first(self, bound_usd: float, low_s: float) -> float:
        """Where a window stands in the queue."""
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


def _best(goal: Goal, totals: Totals, allowed: BoolArray, known: float) -> tuple[IntArray, float]:
    """The number of the plan that is better than any `known`, if there is one, and the lowest objective now known."""
    objective = np.where(allowed, goal.objective(totals.iteration_s, totals.cost_usd), np.inf)
    if not objective.size or objective.min() >= known:
        return np.empty(0, dtype=np.int64), known
    return np.array([objective.argmin()]), float(objective.min())
