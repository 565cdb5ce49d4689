"""The simulator where open tasks take turns on their lanes, and every task is as fast as if it ran alone."""

import heapq

from funcpipe.scheduler.costs import Costs
from funcpipe.scheduler.wiring import Wiring


class Turns:
    """One play, from moment to moment: what ends next, what it releases, who has each lane.

    An open task waits for its latency first and then for its lane. Of those that wait for a lane, the one that comes
    first in the graph is next.
    """

    def __init__(self, wiring: Wiring, costs: Costs) -> None:
        self._wiring = wiring
        self._waits = list(wiring.waits)
        self._latency_s: list[float] = costs.seconds.tolist()
        self._body_s: list[float] = (costs.alone_s - costs.seconds).tolist()
        self._coming: list[tuple[float, int]] = []  # heap of (when, task), and beyond all tasks ends of latencies
        self._taken = [False] * wiring.lanes
        self._queues: list[list[int]] = [[] for _ in range(wiring.lanes)]
        self._starts_s = [-1.0] * len(self._waits)
        self._ends_s = [-1.0] * len(self._waits)

    def play(self, starting_s: list[float]) -> tuple[list[float], list[float]]:
        """When each task starts and ends (below nought: never); workers start after `starting_s`."""
        wiring, coming, ends_s, waits = self._wiring, self._coming, self._ends_s, self._waits
        count, lane_of, releases = len(waits), wiring.lane, wiring.releases
        coming += ((seconds, wiring.tasks + worker) for worker, seconds in enumerate(starting_s))
        heapq.heapify(coming)
        while coming:
            now_s, task = heapq.heappop(coming)
            if task >= count:
                self._queue(task - count, now_s)
                continue
            ends_s[task] = now_s
            for later in releases[task]:
                waits[later] -= 1
                if not waits[later]:
                    self._begin(later, now_s)
            if lane_of[task] >= 0:
                self._next_on(lane_of[task], now_s)
        return self._starts_s, ends_s

    def _begin(self, task: int, now_s: float) -> None:
        if self._wiring.open[task]:
            self._starts_s[task] = now_s
            heapq.heappush(self._coming, (now_s + self._latency_s[task], task + len(self._waits)))
        elif self._wiring.lane[task] < 0:
            self._start(task, now_s)
        else:
            self._queue(task, now_s)

    def _queue(self, task: int, now_s: float) -> None:
        lane = self._wiring.lane[task]
        heapq.heappush(self._queues[lane], task)
        if not self._taken[lane]:
            self._next_on(lane, now_s)

    def _next_on(self, lane: int, now_s: float) -> None:
        queue = self._queues[lane]
        self._taken[lane] = bool(queue)
        if queue:
            self._start(heapq.heappop(queue), now_s)

    def _start(self, task: int, now_s: float) -> None:
        seconds = self._body_s[task]
        if not self._wiring.open[task]:
            self._starts_s[task] = now_s
            seconds += self._latency_s[task]
        heapq.heappush(self._coming, (now_s + seconds, task))
