"""Something that running tasks share, such as a link or processors, as a fluid: each at a rate, all rates at once."""

import heapq
import math
from collections.abc import Sequence


class FairShare:
    """Tasks at work, in classes that progress alike: a task of class c at factor[c] · min(limit[c], fair share).

    The fair share is as large as `capacity`, the sum of all min(limit, fair share), allows (max-min fairness). As the
    tasks of a class are equally fast, one number says how far any of them would have come, and those that end first
    stand first in a heap. `next_end_s` is when the next of all tasks ends, `next_task` which.
    """

    def __init__(self, limits: Sequence[float], factors: Sequence[float], capacity: float) -> None:
        self.next_end_s = math.inf
        self.next_task = -1
        self._limits = tuple(limits)
        self._factors = tuple(factors)
        self._capacity = capacity
        self._by_limit = sorted(range(len(limits)), key=self._limits.__getitem__)
        self._tasks = 0
        self._counts = [0] * len(limits)
        self._rates = [0.0] * len(limits)
        self._progress = [0.0] * len(limits)
        self._ends: list[list[tuple[float, int]]] = [[] for _ in limits]  # heaps of (progress at which it ends, task)
        self._members: dict[int, tuple[int, float]] = {}  # task -> class, progress at which it ends
        self._now_s = 0.0

    def join(self, task: int, kind: int, work: float, now_s: float) -> None:
        """Let `task` begin, as one of class `kind`, with `work` to do."""
        self._advance(now_s)
        end = self._progress[kind] + work
        self._members[task] = (kind, end)
        heapq.heappush(self._ends[kind], (end, task))
        self._counts[kind] += 1
        self._tasks += 1
        self._share()

    def leave(self, task: int, now_s: float) -> float:
        """Take `task` out; the work that it had left."""
        self._advance(now_s)
        kind, end = self._members.pop(task)
        left = max(0.0, end - self._progress[kind])
        self._counts[kind] -= 1
        self._tasks -= 1
        if not self._counts[kind]:
            self._progress[kind] = 0.0
            self._ends[kind].clear()
        self._share()
        return left

    def _advance(self, now_s: float) -> None:
        """Let all tasks work until now."""
        seconds = now_s - self._now_s
        self._now_s = now_s
        if seconds:
            for kind, count in enumerate(self._counts):
                if count:
                    self._progress[kind] += self._rates[kind] * seconds

    def _share(self) -> None:
        """Set all rates anew, and find what ends next."""
        left, tasks, first_s, self.next_task = self._capacity, self._tasks, math.inf, -1
        for kind in self._by_limit:
            count = self._counts[kind]
            if not count:
                continue
            fair, limit = left / tasks, self._limits[kind]
            rate = limit if limit < fair else fair
            left -= count * rate
            tasks -= count
            rate *= self._factors[kind]
            self._rates[kind] = rate
            ends = self._ends[kind]
            while self._members.get(ends[0][1]) != (kind, ends[0][0]):
                heapq.heappop(ends)  # it has left
            seconds = (ends[0][0] - self._progress[kind]) / rate
            if seconds < first_s:
                first_s, self.next_task = seconds, ends[0][1]
        self.next_end_s = self._now_s + max(0.0, first_s)


class Unshared:
    """The same where there is enough for all: a task's end is known when it begins, and given to `alarm`."""

    def __init__(self, limits: Sequence[float], factors: Sequence[float], alarm: "Alarm") -> None:
        self._rates = [limit * factor for limit, factor in zip(limits, factors, strict=True)]
        self._alarm = alarm
        self._members: dict[int, tuple[float, float]] = {}  # task -> rate, end

    def join(self, task: int, kind: int, work: float, now_s: float) -> None:
        """Let `task` begin, as one of class `kind`, with `work` to do."""
        rate = self._rates[kind]
        end_s = now_s + work / rate
        self._members[task] = (rate, end_s)
        self._alarm.set(end_s, task)

    def leave(self, task: int, now_s: float) -> float:
        """Take `task` out; the work that it had left."""
        rate, end_s = self._members.pop(task)
        return max(0.0, end_s - now_s) * rate


class Alarm:
    """When something happens to a task, if nothing else happens to it before: a later setting replaces an earlier."""

    def __init__(self, tasks: int) -> None:
        self._set: list[tuple[float, int, int]] = []  # heap of (when, task, number of its setting)
        self._settings = [0] * tasks

    def set(self, when_s: float, task: int) -> None:
        """Let it ring for `task` at `when_s`."""
        number = self._settings[task] = self._settings[task] + 1
        heapq.heappush(self._set, (when_s, task, number))

    def drop(self, task: int) -> None:
        """Let it not ring for `task`."""
        self._settings[task] += 1

    def next_s(self) -> float:
        """When it rings next; infinity if never."""
        waiting = self._set
        while waiting:
            when_s, task, number = waiting[0]
            if number == self._settings[task]:
                return when_s
            heapq.heappop(waiting)
        return math.inf

    def take(self) -> int:
        """The task that it rings for next."""
        return heapq.heappop(self._set)[1]
