"""A search for plans that ends with a proof, or with the best plans so far and a bound.

Every setting (replicas, synchronisation) is a space of plans, cut into windows of time. Windows wait in a queue, the
one that promises most in front. A window is first tightened: options that no worthwhile plan has leave it, and where
nothing is left the window is done. What remains is either small enough to be searched label by label, or split in two.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from dataclasses import field as item

import numpy as np

from funcpipe.core import MB, Plan
from funcpipe.partitioner.cost.formulas import Array
from funcpipe.partitioner.problem.problem import Choice, Goal, Problem
from funcpipe.partitioner.problem.stage_graph import IntArray, build_stage_graph
from funcpipe.partitioner.search.incumbents import CLOSE, Aim, Cheapest, Fastest
from funcpipe.partitioner.search.initial_bounds import InitialBounds, initial_bounds
from funcpipe.partitioner.search.labels import TooManyLabels, search
from funcpipe.partitioner.search.option_network import OptionNetwork, total
from funcpipe.partitioner.search.spaces import Space, counted, spaces
from funcpipe.partitioner.search.time_window import TimeWindow, tighten

_SEARCHABLE = 2000
_LABELS = 100_000
_NARROW = 1.004
_FINE_STEP = 1.02
_STEPS = 11
_FEW_RUNGS = 10
_RUNGS = 24
_ROUNDING = 1e-9


def aim_of(goal: Goal) -> Aim:
    """What a search for the best plan is after."""
    return Fastest(goal) if goal.counts_seconds else Cheapest(goal)


def spaces_of(problem: Problem) -> Iterator[Space]:
    """All spaces of a problem."""
    return spaces(problem, build_stage_graph(problem.profile, admits=problem.placed.admits))


@dataclass(frozen=True, slots=True)
class Found:
    """A plan found: its space and stages, and what it takes."""

    space: Space
    choices: list[Choice]
    iteration_s: float
    cost_usd: float

    def plan(self, problem: Problem) -> Plan:
        """The plan, with its estimate; of schedules that do equally well it has the plainest."""
        setting = self.space.setting
        plans = [
            problem.plan(replace(setting, schedule=schedule), self.choices)
            for schedule in problem.schedules(setting.replicas)
        ]
        chosen = next(plan for plan in plans if plan.schedule is setting.schedule)
        return next(plan for plan in plans if plan is chosen or _does_as_well(plan, chosen))


def _does_as_well(plan: Plan, other: Plan) -> bool:
    """Whether `plan` fits its functions and takes no more than `other`."""
    assert plan.estimate is not None
    assert other.estimate is not None
    fits = all(
        needs.memory_bytes <= stage.memory_mb * MB
        for needs, stage in zip(plan.estimate.stages, plan.stages, strict=True)
    )
    faster = plan.estimate.iteration_s <= other.estimate.iteration_s * (1 + _ROUNDING)
    return fits and faster and plan.estimate.cost_usd <= other.estimate.cost_usd * (1 + _ROUNDING)


@dataclass(order=True, slots=True)
class _Entry:
    first: float
    number: int
    space: Space = item(compare=False)
    window: TimeWindow = item(compare=False)
    counted: bool = item(compare=False)


class Search:
    """A search under way: what was found, each better than the one before, and the windows still to be looked into."""

    def __init__(
        self,
        problem: Problem,
        aim: Aim,
        time_is_up: Callable[[], bool] = lambda: False,
        *,
        among: Iterable[Space] | None = None,
    ) -> None:
        """Search the plans of the problem, or of the spaces `among` alone."""
        self.problem, self.aim, self.time_is_up = problem, aim, time_is_up
        self.among = spaces_of(problem) if among is None else among
        self.found: list[Found] = []
        self.bound = math.inf
        self.complete = True
        self._queue: list[_Entry] = []
        self._numbers = itertools.count()

    def run(self) -> None:
        """Search until nothing better can exist, or time is up and something is found."""
        swept = []
        for space in self.among:
            first_look = initial_bounds(space.field)
            if first_look is not None:
                self._offer(space, space.field, first_look.paths)
                swept.append((space, first_look))
        for space, first_look in swept:
            self._cut(space, first_look)
        while self._queue and not self._must_stop(self._queue[0].first):
            self._look_into(heapq.heappop(self._queue))
        if self.found:
            self.bound = min(self.bound, self.aim.best * CLOSE)

    def _must_stop(self, bound: float) -> bool:
        if self.found and self.time_is_up():
            self.bound, self.complete = min(self.bound, bound), False
            return True
        return False

    def _cut(self, space: Space, look: InitialBounds) -> None:
        """Queue the windows of a space."""
        low_s = look.fastest_s * (1 - _ROUNDING)
        latest_s = min(look.slowest_s * (1 + _ROUNDING), self.aim.latest_s)
        worth_usd, value = float(self.aim.threshold_usd(np.array([low_s]))[0]), self.aim.time_value_usd_s
        least_usd_s = look.least_price_usd_s + value
        if least_usd_s > 0:
            latest_s = min(latest_s, worth_usd / least_usd_s)
        if low_s > latest_s:
            return
        times_s = np.geomspace(low_s, latest_s, 2 + int(math.log(latest_s / low_s) / math.log(_FINE_STEP)))
        seconds_usd = (look.price_usd_s(times_s[1:]) + value) * (1 - _ROUNDING)
        worth = seconds_usd * times_s[:-1] < self.aim.threshold_usd(times_s[:-1])
        for run in np.split(np.arange(len(worth)), np.flatnonzero(np.diff(worth)) + 1):
            if worth[run[0]]:
                for part in np.array_split(run, -(-len(run) // _STEPS)):
                    self._push_part(space, times_s, seconds_usd, part)

    def _push_part(self, space: Space, times_s: Array, seconds_usd: Array, part: IntArray) -> None:
        """Queue the window of the steps of time `part`."""
        low_s, second_usd = float(times_s[part[0]]), float(seconds_usd[part].min())
        window = TimeWindow(
            field=space.field,
            low_s=low_s,
            high_s=float(times_s[part[-1] + 1]),
            time_value_usd_s=self.aim.time_value_usd_s,
            second_usd=second_usd,
            bound_usd=float((seconds_usd * times_s[:-1])[part].min()),
        )
        self._push(space, window, counted=space.counted)

    def _look_into(self, entry: _Entry) -> None:
        space = entry.space
        rungs = _FEW_RUNGS if len(entry.window.field) > _SEARCHABLE else _RUNGS
        window = tighten(entry.window, self._threshold_usd(entry.window), rungs=rungs)
        if window is None:
            return
        narrow = window.high_s < window.low_s * _NARROW
        if not entry.counted and (narrow or len(window.field) <= _SEARCHABLE):
            self._push(space, window.at(field=counted(space, window.field)), counted=True)
        elif not self._searched(space, window, label_limit=math.inf if narrow else _LABELS):
            middle_s = math.sqrt(window.low_s * window.high_s)
            for part in (window.at(high_s=middle_s), window.at(low_s=middle_s)):
                self._push(space, part, counted=entry.counted)

    def _searched(self, space: Space, window: TimeWindow, *, label_limit: float) -> bool:
        """Search the window label by label; false if it is too large for that."""
        if len(window.field) > _SEARCHABLE and label_limit < math.inf:
            return False
        try:
            for paths in search(window, self.aim, label_limit=label_limit):
                if paths is not None:
                    self._offer(space, window.field, paths)
                elif self._must_stop(self.aim.first(window.bound_usd, window.low_s)):
                    break
        except TooManyLabels:
            return False
        return True

    def _push(self, space: Space, window: TimeWindow, *, counted: bool) -> None:
        too_late, too_dear = window.low_s > self.aim.latest_s, window.bound_usd >= self._threshold_usd(window)
        if too_late or too_dear or not len(window.field):
            return
        first = self.aim.first(window.bound_usd, window.low_s)
        heapq.heappush(self._queue, _Entry(first, next(self._numbers), space, window, counted))

    def _threshold_usd(self, window: TimeWindow) -> float:
        return float(self.aim.threshold_usd(np.array([window.low_s]))[0])

    def _offer(self, space: Space, field: OptionNetwork, paths: IntArray) -> None:
        """Make known the plans that the columns of `paths` stand for, as far as the space admits them."""
        totals = total(field, paths)
        allowed = totals.fits & (totals.stages >= space.fewest) & (totals.stages <= space.most)
        for number in self.aim.offer(totals, allowed):
            self.found.append(
                Found(
                    space,
                    space.choices(field, paths[:, number]),
                    float(totals.iteration_s[number]),
                    float(totals.cost_usd[number]),
                )
            )


def best_for(problem: Problem, goal: Goal) -> Plan | None:
    """The plan that is best for `goal` instead of the goal of `problem`; None if there is none."""
    search = Search(problem, aim_of(goal))
    search.run()
    return search.found[-1].plan(problem) if search.found else None
