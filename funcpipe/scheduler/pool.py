"""Something that running tasks share, such as a link or processors, as a fluid: each at a rate, all rates at once."""

import heapq
import math
from collections.abc import Sequence


class Pool:
    """Tasks at work, in classes that progress alike: a task of class c at factor[c] · min(limit[c], fair share).

    The fair share is as large as `capacity`, the sum of all min(limit, fair share), allows (max-min fairness). As the
    tasks of a class are equally fast, one number says how far any of them would have come, and those that end first
    stand first in a heap.
    """

    def __init__(self, limits: Sequence[float], factors: Sequence[float], capacity: float | None) -> None:
        self._limits = tuple(limits)
        self._factors = tuple(factors)
        self._capacity = math.inf if capacity is None else capacity
        self._by_limit = sorted(range(len(limits)), key=self._limits.__getitem__)
        self._counts = [0] * len(limits)
        self._rates = [0.0] * len(limits)
        self._progress = [0.0] * len(limits)
        self._ends: list[list[tuple[float, int]]] = [[] for _ in limits]  # heaps of (progress at which it ends, task)
        self._members: dict[int, tuple[int, float]] = {}  # task -> class, progress at which it ends

    def __contains__(self, task: int) -> bool:
        return task in self._members

    def join(self, task: int, kind: int, work: float) -> None:
        """Let `task` begin, as one of class `kind`, with `work` to do."""
        end = self._progress[kind] + work
        self._members[task] = (kind, end)
        heapq.heappush(self._ends[kind], (end, task))
        self._counts[kind] += 1
        self._share()

    def leave(self, task: int) -> float:
        """Take `task` out; the work that it had left."""
        kind, end = self._members.pop(task)
        left = max(0.0, end - self._progress[kind])
        self._counts[kind] -= 1
        if not self._counts[kind]:
            self._progress[kind] = 0.0
            self._ends[kind].clear()
        self._share()
        return left

    def next_end(self) -> tuple[float, int]:
        """In how many seconds the next task ends, and which; infinity where there is none."""
        first = (math.inf, -1)
        for kind, count in enumerate(self._counts):
            if count:
                ends = self._ends[kind]
                while self._members.get(ends[0][1]) != (kind, ends[0][0]):
                    heapq.heappop(ends)  # it has left
                first = min(first, (max(0.0, ends[0][0] - self._progress[kind]) / self._rates[kind], ends[0][1]))
        return first

    def advance(self, seconds: float) -> None:
        """Let all tasks work for `seconds`."""
        for kind, count in enumerate(self._counts):
            if count:
                self._progress[kind] += self._rates[kind] * seconds

    def _share(self) -> None:
        left, tasks = self._capacity, sum(self._counts)
        for kind in self._by_limit:
            if count := self._counts[kind]:
                rate = min(self._limits[kind], left / tasks)
                self._rates[kind] = self._factors[kind] * rate
                left -= count * rate
                tasks -= count
