"""A search for plans that ends with a proof, or with the best plans so far and a bound.

Every setting (replicas, schedule) is a space of plans, which is cut into windows of time. Windows wait
in a queue, in the order of the lowest objective that they may hold. The first one is tightened: options that no
worthwhile plan needs leave it. Then it is

- done, if nothing is left in it;
- searched label by label, if few options are left or it is narrow;
- made smaller, if merged labels show that most of its options are not needed (`needed_options`);
- split into narrower windows otherwise, which go back into the queue.

When the first window of the queue cannot hold anything better than the best plan known, that plan is optimal. If time
is up before, the bound is the least of what was not looked into; of spaces that were not even begun nothing is known
except that no objective is below 0.

By hand: a best plan of 15 $ is known, and windows wait with bounds of 12, 14 and 16 $. The third is not worth looking
into. The first is tightened, its bound rises to 15.1 $, and it is done; the second is searched, and a plan of 14.5 $ is
found. The queue is empty: 14.5 $ is optimal. Had time been up after the first, the gap would be (15 − 14) / 15 = 7 %.

The exact search: the best plan with proof, or the best plan so far with a bound. It needs no solver.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from funcpipe.core import Plan, ScheduleKind
from funcpipe.partitioner.cost import IntArray
from funcpipe.partitioner.problem.goal import Goal
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.problem.stage_graph import StageGraph
from funcpipe.partitioner.search.incumbents import CLOSE, Found, Incumbents, incumbents_for
from funcpipe.partitioner.search.initial_bounds import InitialBounds, initial_bounds
from funcpipe.partitioner.search.label_search import TooManyLabels, likely_plans, needed_options, search_labels
from funcpipe.partitioner.search.option_network import OptionNetwork, all_ends, few_ends, path_costs
from funcpipe.partitioner.search.spaces import Space, all_spaces, spaces, with_stage_counts
from funcpipe.partitioner.search.time_window import ROUNDING, TimeWindow, first_windows, tighten

_SEARCHABLE = 2000
"""A window with no more options is searched label by label."""
_FEW_PAIRS = 1_000_000
_PAIRS = 30_000_000
"""If more pairs of labels than this would have to be compared, the window is made smaller, or split, instead."""
_PARTS = 4
"""Into how many windows one is split in which that was so."""
_NARROW = 1.004
"""A window whose ends are closer than this ratio is searched however many labels it has: splitting no longer helps."""
_FEW_CAPS = 8
_CAPS = 24
"""How many caps a window is tightened with, when it has many options and when it has few."""
_SAMPLED_LABELS = 48
"""The number of labels of each node, about, that are kept to sample a window for a better plan to prune with."""
_SOONER = 0.9
"""How much sooner than the best plan known windows may end that are looked into first."""
_FEW_OPTIONS, _MERGEABLE = 60, 6000
_FEW_LABELS, _MORE_LABELS = 128, 1024
"""With how many options merging labels is worth its time, and how many labels of each node are kept then."""
_HARDLY_FEWER = 0.7
"""If merged labels leave more than this share of the options, the same again is not worth its time."""


@dataclass(order=True, slots=True)
class _Entry:
    """A window in the queue; of equal priorities the older one comes first."""

    priority: float
    number: int
    space: Space = field(compare=False)
    window: TimeWindow = field(compare=False)
    counts_stages: bool = field(compare=False)
    sampled: bool = field(compare=False)


class Search:
    """A search under way: what was found, each better than the one before, and the windows still to be looked into.

    When it has run, no plan has an objective below `bound`, and `complete` says whether everything was looked into.
    `closest` are the best plans met on the way for each number of replicas and schedule.
    """

    def __init__(
        self,
        problem: Problem,
        incumbents: Incumbents,
        time_is_up: Callable[[], bool] = lambda: False,
        *,
        among: Iterable[Space] | None = None,
    ) -> None:
        """Search the plans of the problem, or only those of the spaces `among`."""
        self.problem, self.incumbents, self.time_is_up = problem, incumbents, time_is_up
        self.among = all_spaces(problem) if among is None else among
        self.found: list[Found] = []
        self.closest: dict[tuple[int, ScheduleKind], Found] = {}
        self.bound = math.inf
        self.complete = True
        self._queue: list[_Entry] = []
        self._numbers = itertools.count()
        self._parts: dict[Space, InitialBounds | None] = {}

    def run(self) -> None:
        """Search until nothing better can exist, or until time is up and something has been found."""
        for space, bounds in self._initial_bounds():
            for window in first_windows(space, bounds, self.incumbents):
                self._push(space, window, counts_stages=space.counts_stages)
        self._search_around_best()
        while self._queue and not self._must_stop(self._queue[0].priority):
            self._process(heapq.heappop(self._queue))
        self.bound = min(self.bound, self.incumbents.best * CLOSE)

    def _search_around_best(self) -> None:
        """Sample the windows around the best plan known: the better it is, the less is left to search."""
        if self.incumbents.best == math.inf or not self.closest:
            return
        found = min(self.closest.values(), key=lambda found: found.objective(self.problem.goal))
        waiting, self._queue = self._queue, []
        for entry in waiting:
            space, window = entry.space, entry.window
            around = window.low_s <= found.iteration_s and window.high_s >= found.iteration_s * _SOONER
            if space is not found.space or not around or self.time_is_up():
                heapq.heappush(self._queue, entry)
                continue
            tightened = self._tightened(window)
            for part, narrower in self._by_schedule(space, tightened) if tightened is not None else ():
                if part.split is None:
                    self._sample(part, narrower)
                self._push(part, narrower, counts_stages=part.counts_stages, sampled=True)

    @staticmethod
    def _by_schedule(space: Space, window: TimeWindow) -> Iterator[tuple[Space, TimeWindow]]:
        """The window in the parts of a space that differ in schedule; or as it is."""
        for part in space.parts if space.by_schedule else (space,):
            yield part, replace(window, network=part.within(window.network, space))

    def _initial_bounds(self) -> list[tuple[Space, InitialBounds]]:
        """The initial bounds of the spaces, of all of them if time allows."""
        found = []
        for space in self.among:
            if self._must_stop(0.0):  # no objective is below 0: all that is known of the rest
                return []
            bounds = self._bounds_of(space)
            if bounds is not None:
                found.append((space, bounds))
        return found

    def _must_stop(self, bound: float) -> bool:
        """Return whether time is up, so that `bound` is all that is known of what is left."""
        if (self.found or self.incumbents.best < math.inf) and self.time_is_up():
            self.bound, self.complete = min(self.bound, bound), False
            return True
        return False

    def _process(self, entry: _Entry) -> None:
        space, window = entry.space, self._tightened(entry.window)
        if window is None:
            return
        narrow = window.high_s < window.low_s * _NARROW
        small = narrow or len(window.network) <= _SEARCHABLE
        if space.by_schedule:
            for part, narrower in self._by_schedule(space, window):
                self._push(part, narrower, counts_stages=part.counts_stages)
        elif space.split is not None:
            for part in space.parts:
                self._push_part(part, space, window)
        elif not entry.sampled and len(window.network) <= _MERGEABLE and self._sample(space, window):
            self._push(space, window, counts_stages=entry.counts_stages, sampled=True)
        elif small and not entry.counts_stages:
            needed = self._needed(window, _FEW_LABELS)
            if needed is not None:
                multiplied = replace(needed, network=with_stage_counts(space, needed.network))
                self._push(space, multiplied, counts_stages=True)
        elif not small or not self._searched(space, window, pair_limit=_FEW_PAIRS):
            self._reduce(entry, window, small=small, narrow=narrow)

    def _reduce(self, entry: _Entry, window: TimeWindow, *, small: bool, narrow: bool) -> None:
        """Make a window in which there is too much to search smaller, or search it all the same, or split it."""
        space = entry.space
        needed = self._needed(window, _FEW_LABELS, *((_MORE_LABELS,) if small else ()))
        if needed is None:
            return
        searchable = len(needed.network) <= _SEARCHABLE
        if len(needed.network) < len(window.network) / 2 or (searchable and not entry.counts_stages):
            self._push(space, needed, counts_stages=entry.counts_stages)
        elif not self._searched(space, needed, pair_limit=math.inf if narrow else _PAIRS):
            parts = _PARTS if searchable else 2
            for low_s, high_s in itertools.pairwise(np.geomspace(window.low_s, window.high_s, parts + 1).tolist()):
                shorter = replace(needed, low_s=low_s, high_s=high_s)
                self._push(space, shorter, counts_stages=entry.counts_stages)

    def _tightened(self, window: TimeWindow) -> TimeWindow | None:
        caps = _FEW_CAPS if len(window.network) > _SEARCHABLE else _CAPS
        return tighten(window, self._threshold_usd(window), caps=caps)

    def _needed(self, window: TimeWindow, *labels: int) -> TimeWindow | None:
        """The window without options that merged labels show not to be needed, first with few of each node, then with
        more; None if no option is left.
        """
        for count in labels:
            share = 0.0
            while share < _HARDLY_FEWER and _FEW_OPTIONS <= len(window.network) <= _MERGEABLE:
                kept = needed_options(window, self.incumbents, labels=count)
                share = float(kept.mean())
                fewer = self._tightened(replace(window, network=window.network.keep(kept))) if share else None
                if fewer is None:
                    return None
                window = fewer
        return window

    def _push_part(self, part: Space, whole: Space, window: TimeWindow) -> None:
        """Queue the window of a space for a part of the space."""
        if part not in self._parts:
            self._parts[part] = self._bounds_of(part)
        bounds = self._parts[part]
        if bounds is None:
            return
        low_s = max(window.low_s, bounds.fastest_s * (1 - ROUNDING))
        if low_s > window.high_s:
            return
        price_usd_s = float(bounds.price_usd_s(np.array([window.high_s]))[0])
        second_usd = max(window.second_usd, (price_usd_s + self.incumbents.time_value_usd_s) * (1 - ROUNDING))
        window = replace(
            window,
            network=part.within(window.network, whole),
            low_s=low_s,
            second_usd=second_usd,
            weights=bounds.weights,
            bound_usd=max(window.bound_usd, second_usd * low_s),
            steepness=1.0,
        )
        self._push(part, window, counts_stages=part.counts_stages)

    def _bounds_of(self, space: Space) -> InitialBounds | None:
        """The initial bounds of a space, whose plans are offered; None if there are none."""
        bounds = initial_bounds(space.network)
        if bounds is not None:
            self._offer(space, space.network, *few_ends(space.network, bounds.paths))
        return bounds

    def _sample(self, space: Space, window: TimeWindow) -> bool:
        """Look for a better plan among a few labels alone; true if there is one."""
        known = len(self.found)
        for paths in likely_plans(window, self.incumbents, keep=_SAMPLED_LABELS):
            self._offer(space, window.network, *all_ends(window.network, paths))
        return len(self.found) > known

    def _searched(self, space: Space, window: TimeWindow, *, pair_limit: float) -> bool:
        """Search the window label by label; false if it is too large for that."""
        if len(window.network) > _SEARCHABLE and pair_limit < math.inf:
            return False
        try:
            for paths in search_labels(window, self.incumbents, pair_limit=pair_limit):
                if paths is not None:
                    self._offer(space, window.network, *all_ends(window.network, paths))
                elif self._must_stop(self.incumbents.priority(window.bound_usd, window.low_s)):
                    break
        except TooManyLabels:
            return False
        return True

    def _push(self, space: Space, window: TimeWindow, *, counts_stages: bool, sampled: bool = False) -> None:
        too_late = window.low_s > self.incumbents.latest_s
        too_expensive = window.bound_usd >= self._threshold_usd(window)
        if too_late or too_expensive or not len(window.network):
            return
        priority = self.incumbents.priority(window.bound_usd, window.low_s)
        heapq.heappush(self._queue, _Entry(priority, next(self._numbers), space, window, counts_stages, sampled))

    def _threshold_usd(self, window: TimeWindow) -> float:
        return float(self.incumbents.threshold_usd(np.array([window.low_s]))[0])

    def _offer(self, space: Space, network: OptionNetwork, paths: IntArray, ways: IntArray) -> None:
        """Offer the plans that the columns of `paths` stand for, as far as the space admits them."""
        if not paths.size:
            return
        costs = path_costs(network, paths, ways)
        allowed = space.admits(costs)

        def found(number: int) -> Found:
            return Found(
                space,
                space.choices(network, paths[:, number], ways[:, number]),
                float(costs.plan.iteration_s[number]),
                float(costs.plan.cost_usd[number]),
            )

        self.found += [found(number) for number in self.incumbents.offer(costs.plan, allowed)]
        objective = self.problem.goal.objective(costs.plan.iteration_s, costs.plan.cost_usd)
        closest = int(np.where(allowed, objective, np.inf).argmin())
        setting = (space.setting.replicas, space.setting.schedule)
        known = self.closest.get(setting)
        if allowed[closest] and (known is None or objective[closest] < known.objective(self.problem.goal)):
            self.closest[setting] = found(closest)


def best_for(problem: Problem, goal: Goal, *, graph: StageGraph | None = None) -> Plan | None:
    """The plan that is best for `goal` instead of the goal of `problem`; None if there is none.

    It is searched in `graph`, or else in the stage graph of the problem, which may raise TooEntangled.
    """
    search = Search(problem, incumbents_for(goal), among=None if graph is None else spaces(problem, graph))
    search.run()
    return search.found[-1].plan(problem) if search.found else None
