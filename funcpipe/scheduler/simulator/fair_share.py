"""Work that gets done at rates: tasks that share a capacity, tasks for which there is enough, and what comes next."""

import heapq
import math
from collections.abc import Sequence


class FairShare:
    """Tasks that share `capacity`, such as of a link or of processors, as a fluid: all work at once, each at a rate.

    `next_end_s` is when the next of them ends, `next_task` which one. Tasks are in *classes* with one limit each (the
    link of a function, the processors that it has). A task of class c works at the rate factor[c] · min(limit[c], fair
    share); the fair share is as large as `capacity` allows, which is the sum of all min(limit, fair share) (max-min
    fairness). `_rates`, `_counts`, `_progress` and `_ends` have one element for each class.

    All tasks of a class are equally fast. So one number, its progress, says how much work a task that has always been
    there would have done; a task that joins at progress p with work w ends at progress p + w, and those that end first
    are first in a heap. A change of rates touches each class, but no task. Each task stands for `mirrors` tasks.

    For example, with a capacity of 10 bytes/s, one task whose link reaches 2 and another whose link reaches 100 get 2
    and 8. With 2 and 18 bytes to move, the first ends at 1 s; the second has 10 left, gets all 10 bytes/s, and ends at
    2 s.
    """

    def __init__(self, limits: Sequence[float], factors: Sequence[float], capacity: float, mirrors: int = 1) -> None:
        self.next_end_s = math.inf
        self.next_task = -1
        self._mirrors = mirrors
        self._limits = tuple(limits)
        self._factors = tuple(factors)
        self._capacity = capacity
        self._by_limit = sorted(range(len(limits)), key=self._limits.__getitem__)
        self._tasks = 0
        self._counts = [0] * len(limits)
        self._rates = [0.0] * len(limits)
        self._progress = [0.0] * len(limits)
        self._ends: list[list[tuple[float, int]]] = [[] for _ in limits]  # heaps of (progress at which it ends, task)
        self._members: dict[int, tuple[int, float]] = {}  # by task: class, progress at which it ends
        self._now_s = 0.0

    def join(self, task: int, work_class: int, work: float, now_s: float) -> None:
        """Let `task` begin, in class `work_class`, with `work` to do."""
        self._advance(now_s)
        end = self._progress[work_class] + work
        self._members[task] = (work_class, end)
        heapq.heappush(self._ends[work_class], (end, task))
        self._counts[work_class] += self._mirrors
        self._tasks += self._mirrors
        self._share()

    def leave(self, task: int, now_s: float) -> float:
        """Take `task` out; returns the work that it has left."""
        has_ended = task == self.next_task and now_s >= self.next_end_s
        self._advance(now_s)
        work_class, end = self._members.pop(task)
        if has_ended:  # exactly, so that all others that end with it do so at the same moment
            self._progress[work_class] = end
        left = max(0.0, end - self._progress[work_class])
        self._counts[work_class] -= self._mirrors
        self._tasks -= self._mirrors
        self._share()
        return left

    def _advance(self, now_s: float) -> None:
        """Let all tasks work until `now_s`."""
        seconds = now_s - self._now_s
        self._now_s = now_s
        if seconds:
            for work_class, count in enumerate(self._counts):
                if count:
                    self._progress[work_class] += self._rates[work_class] * seconds

    def _share(self) -> None:
        """Set all rates, and find what ends next."""
        left, tasks, first_s, self.next_task = self._capacity, self._tasks, math.inf, -1
        for work_class in self._by_limit:
            count = self._counts[work_class]
            if not count:
                continue
            fair, limit = left / tasks, self._limits[work_class]
            rate = limit if limit < fair else fair
            left -= count * rate
            tasks -= count
            rate *= self._factors[work_class]
            self._rates[work_class] = rate
            ends = self._ends[work_class]
            while self._members.get(ends[0][1]) != (work_class, ends[0][0]):
                heapq.heappop(ends)  # has left since
            seconds = (ends[0][0] - self._progress[work_class]) / rate
            if seconds < first_s:
                first_s, self.next_task = seconds, ends[0][1]
        self.next_end_s = self._now_s + max(0.0, first_s)


class Unshared:
    """The same where there is enough for all: a task's end is known when it begins, and put into `events`."""

    def __init__(self, limits: Sequence[float], factors: Sequence[float], events: "EventQueue") -> None:
        self._rates = [limit * factor for limit, factor in zip(limits, factors, strict=True)]
        self._events = events
        self._members: dict[int, tuple[float, float]] = {}  # by task: rate, end

    def join(self, task: int, work_class: int, work: float, now_s: float) -> None:
        """Let `task` begin, in class `work_class`, with `work` to do."""
        rate = self._rates[work_class]
        end_s = now_s + work / rate
        self._members[task] = (rate, end_s)
        self._events.set(end_s, task)

    def leave(self, task: int, now_s: float) -> float:
        """Take `task` out; returns the work that it has left."""
        rate, end_s = self._members.pop(task)
        return max(0.0, end_s - now_s) * rate


class EventQueue:
    """The next event of each task: setting it again replaces what was set before."""

    def __init__(self, tasks: int) -> None:
        self._set: list[tuple[float, int, int]] = []  # heap: when, task, number of the setting
        self._settings = [0] * tasks

    def set(self, when_s: float, task: int) -> None:
        """The next event of `task` is at `when_s`."""
        number = self._settings[task] = self._settings[task] + 1
        heapq.heappush(self._set, (when_s, task, number))

    def drop(self, task: int) -> None:
        """`task` has no next event."""
        self._settings[task] += 1

    def next_s(self) -> float:
        """Return the time of the first event; infinity if there is none."""
        waiting = self._set
        while waiting:
            when_s, task, number = waiting[0]
            if number == self._settings[task]:
                return when_s
            heapq.heappop(waiting)
        return math.inf

    def take(self) -> int:
        """Take out the first event, which `next_s` has found; returns its task."""
        return heapq.heappop(self._set)[1]
