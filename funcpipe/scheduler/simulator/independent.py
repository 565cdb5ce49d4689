"""The simulator where every task is as fast as if it ran alone."""

from heapq import heapify, heappop, heappush

from funcpipe.scheduler.simulator.compiled_graph import CompiledGraph
from funcpipe.scheduler.simulator.costs import Costs


class Turns:
    """One play, from moment to moment: what ends next, what it releases, who has each lane.

    An open task waits for its latency first and then for its lane. Of those that wait for a lane, the one that comes
    first in the graph is next. Almost all the time of a play goes into the loop and into `_begin`, which is why both
    hold on to what they read in local names.
    """

    def __init__(self, wiring: CompiledGraph, costs: Costs) -> None:
        count = len(wiring.waits)
        self._wiring = wiring
        self._latency_s: list[float] = costs.seconds.tolist()
        self._body_s: list[float] = (costs.alone_s - costs.seconds).tolist()
        self._whole_s: list[float] = costs.alone_s.tolist()
        self._coming: list[tuple[float, int]] = []  # heap of (when, task), and beyond all tasks ends of latencies
        self._taken = [False] * wiring.lanes
        self._queues: list[list[int]] = [[] for _ in range(wiring.lanes)]
        self._starts_s = [-1.0] * count
        self._ends_s = [-1.0] * count

    def play(self, starting_s: list[float]) -> tuple[list[float], list[float]]:
        """When each task starts and ends (below nought: never); workers start after `starting_s`."""
        coming, ends_s, waits, begin = self._coming, self._ends_s, list(self._wiring.waits), self._begin
        count, lane_of, queues, taken = len(waits), self._wiring.lane, self._queues, self._taken
        first, released = self._wiring.first, self._wiring.released
        coming += ((seconds, self._wiring.tasks + worker) for worker, seconds in enumerate(starting_s))
        heapify(coming)
        while coming:
            now_s, task = heappop(coming)
            if task >= count:
                self._queue(task - count, now_s)
                continue
            ends_s[task] = now_s
            for later in released[first[task] : first[task + 1]]:
                waits[later] -= 1
                if not waits[later]:
                    begin(later, now_s)
            lane = lane_of[task]
            if lane >= 0:
                if queues[lane]:
                    self._start(heappop(queues[lane]), now_s)
                else:
                    taken[lane] = False
        return self._starts_s, ends_s

    def _begin(self, task: int, now_s: float) -> None:
        """All that `task` needs has ended."""
        wiring = self._wiring
        lane = wiring.lane[task]
        if lane < 0:
            self._starts_s[task] = now_s
            heappush(self._coming, (now_s + self._whole_s[task], task))
        elif wiring.open[task]:
            self._starts_s[task] = now_s
            heappush(self._coming, (now_s + self._latency_s[task], task + len(wiring.waits)))
        else:
            self._queue(task, now_s)

    def _queue(self, task: int, now_s: float) -> None:
        lane = self._wiring.lane[task]
        if self._taken[lane]:
            heappush(self._queues[lane], task)
        else:
            self._taken[lane] = True
            self._start(task, now_s)

    def _start(self, task: int, now_s: float) -> None:
        """`task` has its lane."""
        if self._wiring.open[task]:
            heappush(self._coming, (now_s + self._body_s[task], task))
        else:
            self._starts_s[task] = now_s
            heappush(self._coming, (now_s + self._whole_s[task], task))
