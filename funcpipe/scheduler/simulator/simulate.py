"""Plays a task graph on a virtual clock: the way into the simulator, and its simulator for tasks on their own.

For example, two stages train on two micro-batches under GPipe. Forwards (F), activations (A) and gradients (G) take 1 s
each way through storage, backwards (B) 2 s; each row is a lane::

    second            0   1   2   3   4   5   6   7   8   9   10  11  12
    stage 0 compute   F0  F1                              B1===== B0=====
    stage 0 upload        A0  A1
    stage 0 download                                  G1      G0
    stage 1 download          A0  A1
    stage 1 compute               F0  F1  B1===== B0=====
    stage 1 upload                                G1      G0

The clock jumps to the next end of a task, which releases others. At 2 s the put of A0 has ended, so stage 1 begins to
get it; at 3 s it is there, and F0 may start. The last F1 ends at 5 s, and B1 follows at once on the same lane. From 5 s
to 9 s stage 0 computes nothing: G1 has to be made, put and got before its B1 starts. The step lasts 13 s.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import islice

import numpy as np

from funcpipe.core import Trace
from funcpipe.errors import PlanError
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.simulator.compiled_graph import (
    CompiledGraph,
    GraphColumns,
    compile_graph,
    graph_arrays,
    graph_columns,
)
from funcpipe.scheduler.simulator.costs import Cost, Costs, LostAttempt, Timeline, costs_of
from funcpipe.scheduler.simulator.disturbances import UNDISTURBED, Disturbances, cold_starts, disturbed, poll_delays
from funcpipe.scheduler.simulator.folded_graph import FoldedGraph, stand_for_others
from funcpipe.scheduler.simulator.request_queues import UNLIMITED, Queues, RequestLimits, StepLimits, queues_of
from funcpipe.scheduler.simulator.shared import SharedSimulator
from funcpipe.scheduler.simulator.sweep import sweep
from funcpipe.scheduler.tasks import Lane, Task


def simulate(
    graph: Graph,
    cost: Callable[[Task], Cost],
    *,
    disturbances: Disturbances = UNDISTURBED,
    run: str = "simulation",
    step: int = 0,
) -> Trace:
    """Play `graph`, each task of which costs what `cost` says, and return its trace; raises what `play` raises."""
    return play(graph, costs_of(graph, cost), disturbances=disturbances).trace(run=run, step=step)


def play(
    graph: Graph, costs: Costs, *, disturbances: Disturbances = UNDISTURBED, limits: RequestLimits = UNLIMITED
) -> Timeline:
    """Start each task as soon as its lane lets it (`tasks.Order`), and return when all of them started and ended.

    Requests wait for their store as `limits` say, and that is a part of their tasks. A get whose object comes while it
    is open finds it by the next of its polls, which are at any time (`poll_delays`).

    Raises PlanError if tasks wait for each other, InvalidValue if `disturbances` names workers that do not exist.
    """
    return _play(graph.tasks, graph_columns(graph), costs, disturbances, queues_of(limits))


def play_folded(
    folded: FoldedGraph, costs: Costs, *, disturbances: Disturbances = UNDISTURBED, limits: StepLimits | None = None
) -> Timeline:
    """Play all tasks of `folded`, of which `costs` has those that are made; returns and raises what `play` does.

    Replicas that do the same are played once where they take the same time: if nothing is drawn or slower for one of
    them (`stand_for_others`), and no request waits for its store. Bytes, processors and requests are counted for all.
    Where all are played, do not slow each other down and do not wait for a store, they are played together (`sweep`).
    """
    if folded.mirrors > 1 and stand_for_others(folded, costs, disturbances):
        queues = None if limits is None else limits.of_mirrors(folded)
        made = _play(folded.graph.tasks, folded.columns, costs, disturbances, queues, folded.mirrors)
        if queues is None or not queues.full:
            return replace(made, tasks=folded.tasks, rows=folded.rows)
    requests = None if limits is None else queues_of(limits.of_all(folded))
    if requests is None and len(folded.tasks) > SWEPT and replace(disturbances, failures=()).independent:
        swept = _play_swept(folded, costs, disturbances)
        if swept is not None:
            return swept
    return _play(folded.tasks, folded.all_columns(), costs.rows(folded.rows), disturbances, requests)


SWEPT = 50_000
"""More tasks than these are played for all workers at a time (`sweep`); fewer are played faster event by event."""


def _play_swept(folded: FoldedGraph, costs: Costs, disturbances: Disturbances) -> Timeline | None:
    if costs.poll_s.any():
        return None
    columns, costs = folded.joined_columns(), costs.rows(folded.rows)
    arrays = graph_arrays(columns)
    disturbances.check_workers(arrays.workers)
    costs = disturbed(costs, columns, disturbances)
    found = sweep(arrays, costs, cold_starts(len(arrays.workers), disturbances), disturbances.failures)
    if found is None:
        return None
    return _timeline(folded.tasks, costs, found.starts_s.tolist(), found.ends_s.tolist(), found.attempts, found.lost)


def _play(
    tasks: Sequence[Task],
    columns: GraphColumns,
    costs: Costs,
    disturbances: Disturbances,
    requests: Queues | None,
    mirrors: int = 1,
) -> Timeline:
    compiled = compile_graph(graph_arrays(columns))
    if mirrors == 1:
        disturbances.check_workers(compiled.workers)
    costs = disturbed(costs, columns, disturbances)
    found_s = poll_delays(costs, disturbances)
    starting_s = cold_starts(len(compiled.workers), disturbances).tolist()
    if not disturbances.independent:
        shared = SharedSimulator(compiled, costs, disturbances, columns.lanes.tolist(), requests, mirrors, found_s)
        shared.play(starting_s)
        starts_s, ends_s, lost = shared.starts_s, shared.ends_s, tuple(shared.lost)
        attempts = [shared.deaths[worker] for worker in compiled.worker_of]
    else:
        starts_s, ends_s = IndependentSimulator(compiled, costs, requests, found_s).play(starting_s)
        attempts, lost = [0] * compiled.tasks, ()
    return _timeline(tasks, costs, starts_s, ends_s, attempts, lost)


def _timeline(
    tasks: Sequence[Task],
    costs: Costs,
    starts_s: list[float],
    ends_s: list[float],
    attempts: Sequence[int],
    lost: tuple[LostAttempt, ...],
) -> Timeline:
    """Return the times of `tasks`, which come first in each list."""
    last = len(tasks)
    _all_ended(tasks, ends_s[:last])
    return Timeline(
        tasks=tasks,
        rows=np.arange(last),
        payload_bytes=costs.payload_bytes,
        starts_s=starts_s[:last],
        ends_s=ends_s[:last],
        attempts=attempts[:last],
        lost=lost,
    )


def _all_ended(tasks: Sequence[Task], ends_s: Sequence[float]) -> None:
    if min(ends_s, default=0.0) >= 0:
        return
    heads: dict[Lane, str] = {}
    for task, end_s in zip(tasks, ends_s, strict=True):
        if end_s < 0:
            heads.setdefault(task.lane, str(task))
    raise PlanError(f"the task graph cannot end; at the heads of its lanes wait {', '.join(heads.values())}")


class IndependentSimulator:
    """Plays one graph once, whose tasks do not slow each other down: each takes as long as if it ran alone.

    A heap holds what comes next, as (when, entry): the end of a task or of a worker's start, or, `len(waits)` higher,
    the end of the latency of a side-by-side transfer, or, twice as much higher, the poll that finds an object. The
    earliest is taken out; it releases entries that waited for it, the first in the graph's order of those on its lane
    that wait to be asked for is asked for, and the lane takes the first of those in its queue. This plays twice as many
    tasks a second as `SharedSimulator`, which has to be ready to change a task's end; a test holds both to one result.
    Almost all of the time goes into the loop of `play` and into `_begin`.

    For example, a worker computes for 2 s (0), then uploads for 1 s (1); entry 2 is its start, at 0 s::

        heap (0 s, 2)    take 2: entry 0 waits for nothing more, begins at 0 s     heap (2 s, 0)
        heap (2 s, 0)    take 0: entry 1 begins at 2 s on a lane that is free      heap (3 s, 1)
        heap (3 s, 1)    take 1: the lane's queue is empty, the play ends          starts 0, 2   ends 2, 3
    """

    def __init__(
        self, graph: CompiledGraph, costs: Costs, requests: Queues | None = None, found_s: list[float] | None = None
    ) -> None:
        count = len(graph.waits)
        self._requests = requests
        self._found_s = found_s
        self._graph = graph
        self._latency_s: list[float] = costs.seconds.tolist()
        self._body_s: list[float] = (costs.alone_s - costs.seconds).tolist()
        self._whole_s: list[float] = costs.alone_s.tolist()
        self._coming: list[tuple[float, int]] = []  # heap; see the module
        self._room = list(graph.room)
        self._unasked: list[list[int]] = [[] for _ in range(graph.lanes)]  # heaps
        self._taken = [False] * graph.lanes
        self._queues: list[list[int]] = [[] for _ in range(graph.lanes)]  # heaps
        self._starts_s = [-1.0] * count
        self._ends_s = [-1.0] * count

    def play(self, starting_s: list[float]) -> tuple[list[float], list[float]]:
        """Starts and ends of all entries, -1 for those that never happen; workers start after `starting_s`."""
        coming, ends_s, waits = self._coming, self._ends_s, list(self._graph.waits)
        begin = self._begin if self._found_s is None else self._poll
        count, lane_of, queues, taken = len(waits), self._graph.lane, self._queues, self._taken
        first, released = self._graph.first, self._graph.released
        room, unasked, later_asked = self._room, self._unasked, [iter(tasks) for tasks in self._graph.asked]
        coming += ((seconds, self._graph.tasks + worker) for worker, seconds in enumerate(starting_s))
        heapify(coming)
        while coming:
            now_s, task = heappop(coming)
            if task >= count:
                self._come(task - count, now_s)
                continue
            ends_s[task] = now_s
            for later in released[first[task] : first[task + 1]]:
                waits[later] -= 1
                if not waits[later]:
                    begin(later, now_s, task)
            lane = lane_of[task]
            if lane >= 0:
                for later in islice(later_asked[lane], 1):
                    waits[later] -= 1
                    if not waits[later]:
                        begin(later, now_s, task)
                room[lane] += 1
                if unasked[lane]:
                    self._ask(heappop(unasked[lane]), now_s)
                if queues[lane]:
                    self._start(heappop(queues[lane]), now_s)
                else:
                    taken[lane] = False
        return self._starts_s, ends_s

    def _come(self, entry: int, now_s: float) -> None:
        """The latency of a side-by-side transfer is over, or a poll has found an object."""
        count = len(self._graph.waits)
        if entry < count:
            self._queue(entry, now_s)
        else:
            self._begin(entry - count, now_s, entry - count)

    def _poll(self, task: int, now_s: float, by: int) -> None:
        """Start `task`, or wait for the poll that finds its object, if `by` is another worker's put."""
        assert self._found_s is not None
        late_s, worker_of = self._found_s[task], self._graph.worker_of
        if late_s and worker_of[task] != worker_of[by]:
            heappush(self._coming, (now_s + late_s, task + 2 * len(self._graph.waits)))
        else:
            self._begin(task, now_s, by)

    def _begin(self, task: int, now_s: float, by: int) -> None:
        """Start `task`, or ask for it as soon as its lane has room: everything that it needs has ended, `by` last."""
        lane = self._graph.lane[task]
        if lane < 0:
            self._starts_s[task] = now_s
            heappush(self._coming, (now_s + self._whole_s[task], task))
        elif self._room[lane]:
            self._ask(task, now_s)
        else:
            heappush(self._unasked[lane], task)

    def _ask(self, task: int, now_s: float) -> None:
        """Open a request, which waits for its latency or for its lane."""
        graph = self._graph
        self._room[graph.lane[task]] -= 1
        if graph.side_by_side[task]:
            self._starts_s[task] = now_s
            let_in_s = now_s if self._requests is None else now_s + self._requests.wait_s(task, now_s)
            heappush(self._coming, (let_in_s + self._latency_s[task], task + len(graph.waits)))
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
            let_in_s = now_s if self._requests is None else now_s + self._requests.wait_s(task, now_s)
            heappush(self._coming, (let_in_s + self._whole_s[task], task))
