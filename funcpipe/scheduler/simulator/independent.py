"""The simulator for tasks that do not slow each other down: each takes as long as if it ran alone.

A heap holds what comes next, as (when, entry): the end of a task or of a worker's start, or, `len(waits)` higher, the
end of the latency of a side-by-side transfer. The earliest is taken out; it releases entries that waited for it, and
its lane takes the first in the graph's order of those in its queue. This plays twice as many tasks a second as
`shared`, which has to be ready to change a task's end; both play by `lane_rules`, and a test holds them to one result.

For example, a worker computes for 2 s (0), then uploads for 1 s (1); entry 2 is its start, at 0 s::

    heap (0 s, 2)    take 2: entry 0 waits for nothing more, begins at 0 s     heap (2 s, 0)
    heap (2 s, 0)    take 0: entry 1 begins at 2 s on a lane that is free      heap (3 s, 1)
    heap (3 s, 1)    take 1: the lane's queue is empty, the play ends          starts 0, 2   ends 2, 3
"""

from heapq import heapify, heappop, heappush

from funcpipe.scheduler.simulator.compiled_graph import CompiledGraph
from funcpipe.scheduler.simulator.costs import Costs


class IndependentSimulator:
    """Plays one graph once. Almost all of the time goes into the loop of `play` and into `_begin`."""

    def __init__(self, graph: CompiledGraph, costs: Costs) -> None:
        count = len(graph.waits)
        self._graph = graph
        self._latency_s: list[float] = costs.seconds.tolist()
        self._body_s: list[float] = (costs.alone_s - costs.seconds).tolist()
        self._whole_s: list[float] = costs.alone_s.tolist()
        self._coming: list[tuple[float, int]] = []  # heap; see the module
        self._taken = [False] * graph.lanes
        self._queues: list[list[int]] = [[] for _ in range(graph.lanes)]  # heaps
        self._starts_s = [-1.0] * count
        self._ends_s = [-1.0] * count

    def play(self, starting_s: list[float]) -> tuple[list[float], list[float]]:
        """Starts and ends of all entries, -1 for those that never happen; workers start after `starting_s`."""
        coming, ends_s, waits, begin = self._coming, self._ends_s, list(self._graph.waits), self._begin
        count, lane_of, queues, taken = len(waits), self._graph.lane, self._queues, self._taken
        first, released = self._graph.first, self._graph.released
        coming += ((seconds, self._graph.tasks + worker) for worker, seconds in enumerate(starting_s))
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
        """Queue `task`: everything that it needs has ended."""
        graph = self._graph
        lane = graph.lane[task]
        if lane < 0:
            self._starts_s[task] = now_s
            heappush(self._coming, (now_s + self._whole_s[task], task))
        elif graph.side_by_side[task]:
            self._starts_s[task] = now_s
            heappush(self._coming, (now_s + self._latency_s[task], task + len(graph.waits)))
        else:
            self._queue(task, now_s)

    def _queue(self, task: int, now_s: float) -> None:
        """Give `task` its lane, now or when those before it have had it."""
        lane = self._graph.lane[task]
        if self._taken[lane]:
            heappush(self._queues[lane], task)
        else:
            self._taken[lane] = True
            self._start(task, now_s)

    def _start(self, task: int, now_s: float) -> None:
        """Start `task`, which has its lane now."""
        if self._graph.side_by_side[task]:
            heappush(self._coming, (now_s + self._body_s[task], task))
        else:
            self._starts_s[task] = now_s
            heappush(self._coming, (now_s + self._whole_s[task], task))
