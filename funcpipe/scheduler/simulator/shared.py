"""The simulator for tasks that slow each other down, and for workers that die.

What a task has left to do is *work*: seconds for a computation, bytes for a transfer. How fast it gets done is up to a
`FairShare` for each direction of transfer and one for processors, which says what ends next. Everything else that comes
is in an `EventQueue`: latencies, starts of workers, failures, and ends where there is enough for all (`Unshared`). The
play goes from one of those moments to the next. Which task may start follows `tasks.Order`, as in
`IndependentSimulator`.

For example, one worker computes for 2 s (0) and uploads 10 bytes at 10 bytes/s after a latency of 0.5 s (1), with a
contention of 1.5::

    0 s      both begin; 0 joins the processors with 2 s of work, at full speed; 1 waits for its latency
    0.5 s    1 begins to move its bytes, so 0 leaves with 1.5 s of work and joins the slower class, at 1/1.5
    1.5 s    1 ends, so 0 leaves with 1.5 - 1/1.5 = 0.833 s of work and joins at full speed
    2.333 s  0 ends
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np

from funcpipe.core import Resource
from funcpipe.scheduler.simulator.compiled_graph import LANES, CompiledGraph
from funcpipe.scheduler.simulator.costs import Costs, LostAttempt
from funcpipe.scheduler.simulator.disturbances import Disturbances
from funcpipe.scheduler.simulator.fair_share import EventQueue, FairShare, Unshared
from funcpipe.scheduler.simulator.request_queues import Queues


class SharedSimulator:
    """Plays one graph once.

    Entries are numbered as in `compiled_graph`, then come the failures. All lists have one element for each entry,
    except `_room`, `_unasked`, `_answered`, `_taken` and `_queues` (for each lane that is not strict) and
    `_transferring`, `_computing` and `deaths` (for each worker).

    A worker that dies loses what it was doing and starts its tasks again; objects that it had written stay written.
    """

    def __init__(
        self,
        graph: CompiledGraph,
        costs: Costs,
        disturbances: Disturbances,
        lanes: Sequence[int],
        requests: Queues | None,
        mirrors: int = 1,
        found_s: Sequence[float] | None = None,
    ) -> None:
        count, workers = len(graph.waits), len(graph.workers)
        self._requests = requests
        self._found_s = [0.0] * count if found_s is None else [*found_s, *[0.0] * (count - len(found_s))]
        self._polling = [False] * count
        self._mirrors = mirrors
        self._graph = graph
        self._failures = disturbances.failures
        self._events = EventQueue(count + len(self._failures))
        links, classes = np.unique(costs.link_bytes_s, return_inverse=True)
        self._link_class: list[int] = classes.tolist()
        self._seconds: list[float] = costs.seconds.tolist()
        self._bytes: list[float] = costs.body_bytes.tolist()
        whole = np.ones_like(costs.processors)
        kinds, classes = np.unique(
            whole if disturbances.shared_cores is None else costs.processors, return_inverse=True
        )
        self._core_class: list[int] = classes.tolist()
        self._processors: list[float] = kinds[classes].tolist()
        self._contended = len(kinds) * (disturbances.contention > 1)  # added to a computation's class while bytes move
        slowed = [1.0] * len(kinds) + [1.0 / disturbances.contention] * len(kinds)
        self._cores = self._share([*kinds.tolist()] * 2, slowed, disturbances.shared_cores)
        weights = [1.0] * len(links)
        caps = disturbances.caps_bytes_s
        shares = {
            (number, store): self._cores if lane is Resource.COMPUTE else self._share(links.tolist(), weights, cap)
            for number, lane in enumerate(LANES)
            for store, cap in enumerate(caps)
        }
        stores = np.minimum(costs.stores, len(caps) - 1).tolist()
        self._share_of = [shares[lane, store] for lane, store in zip(lanes, stores, strict=True)]
        self._fair_shares = [share for share in dict.fromkeys(shares.values()) if isinstance(share, FairShare)]
        self._waits = list(graph.waits)
        self._working = [False] * count
        self._room = list(graph.room)
        self._unasked: list[list[int]] = [[] for _ in range(graph.lanes)]  # heaps
        self._answered = [0] * graph.lanes  # requests that have ended
        self._taken = [False] * graph.lanes
        self._queues: list[list[int]] = [[] for _ in range(graph.lanes)]  # heaps
        self._delivered = [False] * count
        self._transferring = [0] * workers  # transfers whose bytes move
        self._computing = [-1] * workers  # task on the compute lane, or -1
        self._now_s = 0.0
        self.deaths = [0] * workers
        self.starts_s = [-1.0] * count
        self.ends_s = [-1.0] * count
        self.lost: list[LostAttempt] = []

    def _share(self, limits: Sequence[float], factors: Sequence[float], capacity: float | None) -> FairShare | Unshared:
        if capacity is None:
            return Unshared(limits, factors, self._events)
        return FairShare(limits, factors, capacity, self._mirrors)

    def play(self, starting_s: Sequence[float]) -> None:
        """Play until nothing more can happen; workers start after `starting_s`."""
        events, count = self._events, len(self._graph.waits)
        for number, seconds in enumerate(starting_s):
            events.set(seconds, self._graph.tasks + number)
        for number, failure in enumerate(self._failures):
            events.set(failure.at_s, count + number)
        while True:
            then_s, share = events.next_s(), None
            for candidate in self._fair_shares:
                if candidate.next_end_s < then_s:
                    then_s, share = candidate.next_end_s, candidate
            if then_s == math.inf:
                return
            self._now_s = then_s
            task = events.take() if share is None else share.next_task
            if task < count:
                self._reach(task)
            else:
                self._die(task - count)

    def _reach(self, task: int) -> None:
        """A task has come to the end of its latency or of its work, or a worker has started."""
        if self._polling[task]:
            self._polling[task] = False
            self._begin(task)
        elif self._working[task]:
            self._stop_work(task)
            self._end(task)
        elif self._graph.side_by_side[task]:
            self._queue(task)
        else:
            self._move_body(task)

    def _begin(self, task: int) -> None:
        """Start `task`, or ask for it as soon as its lane has room: everything that it needs has ended."""
        lane = self._graph.lane[task]
        if lane < 0:
            self._start(task)
        elif self._room[lane]:
            self._ask(task)
        else:
            heapq.heappush(self._unasked[lane], task)

    def _ask(self, task: int) -> None:
        """Open a request, which waits for its latency or for its lane."""
        self._room[self._graph.lane[task]] -= 1
        if self._graph.side_by_side[task]:
            self.starts_s[task] = self._now_s
            wait_s = self._requests.wait_s(task, self._now_s) if self._requests else 0.0
            self._events.set(self._now_s + wait_s + self._seconds[task], task)
        else:
            self._queue(task)

    def _queue(self, task: int) -> None:
        """Give `task` its lane, now or when those before it have had it."""
        lane = self._graph.lane[task]
        heapq.heappush(self._queues[lane], task)
        if not self._taken[lane]:
            self._next_on(lane)

    def _next_on(self, lane: int) -> None:
        self._taken[lane] = bool(self._queues[lane])
        if self._taken[lane]:
            self._start(heapq.heappop(self._queues[lane]))

    def _start(self, task: int) -> None:
        """Start `task`, which has its lane now."""
        if self._graph.side_by_side[task]:
            self._move_body(task)
            return
        self.starts_s[task] = self._now_s
        worker, seconds = self._graph.worker_of[task], self._seconds[task]
        if self._share_of[task] is self._cores and seconds:
            self._computing[worker] = task
            self._start_work(task, self._computes_in(task, worker), seconds * self._processors[task])
        else:
            wait_s = self._requests.wait_s(task, self._now_s) if self._requests and task < self._graph.tasks else 0.0
            self._events.set(self._now_s + wait_s + seconds, task)

    def _move_body(self, task: int) -> None:
        if task < self._graph.tasks and self._bytes[task]:
            self._start_work(task, self._link_class[task], self._bytes[task])
            self._count_transfers(self._graph.worker_of[task], +1)
        else:
            self._end(task)

    def _start_work(self, task: int, work_class: int, work: float) -> None:
        self._working[task] = True
        self._share_of[task].join(task, work_class, work, self._now_s)

    def _stop_work(self, task: int) -> None:
        worker, share = self._graph.worker_of[task], self._share_of[task]
        self._working[task] = False
        share.leave(task, self._now_s)
        if share is self._cores:
            self._computing[worker] = -1
        else:
            self._count_transfers(worker, -1)

    def _count_transfers(self, worker: int, change: int) -> None:
        """One transfer more or one less moves bytes of `worker`: its computation may slow down or recover."""
        before = self._transferring[worker]
        after = self._transferring[worker] = before + change
        task = self._computing[worker]
        if task >= 0 and self._contended and not (before and after):
            left = self._cores.leave(task, self._now_s)
            self._cores.join(task, self._computes_in(task, worker), left, self._now_s)

    def _computes_in(self, task: int, worker: int) -> int:
        """Return the class of a computation."""
        return self._core_class[task] + (self._contended if self._transferring[worker] else 0)

    def _end(self, task: int) -> None:
        self.ends_s[task] = self._now_s
        worker_of, again = self._graph.worker_of, self._delivered[task]
        for later in self._graph.releases(task):
            own = worker_of[later] == worker_of[task]
            if not again or own:
                self._release(later, polled=not own)
        self._delivered[task] = True
        if (lane := self._graph.lane[task]) >= 0:
            self._close(lane)
            self._next_on(lane)

    def _release(self, task: int, *, polled: bool = False) -> None:
        self._waits[task] -= 1
        if self._waits[task]:
            return
        if polled and self._found_s[task]:
            self._polling[task] = True
            self._events.set(self._now_s + self._found_s[task], task)
        else:
            self._begin(task)

    def _close(self, lane: int) -> None:
        """A request has ended, so that there is room for another."""
        asked, answered = self._graph.asked[lane], self._answered[lane]
        self._answered[lane] += 1
        if answered < len(asked):
            self._release(asked[answered])
        self._room[lane] += 1
        if self._unasked[lane]:
            self._ask(heapq.heappop(self._unasked[lane]))

    def _die(self, number: int) -> None:
        """Undo what a worker has done, except for objects that others may have read; if it is done, leave it alone."""
        failure = self._failures[number]
        worker = self._graph.workers[failure.worker]
        own = [i for i in range(len(self._graph.waits)) if self._graph.worker_of[i] == worker]
        if all(self.ends_s[task] >= 0 for task in own):
            return
        for task in own:
            self._undo(task)
        for lane in {self._graph.lane[task] for task in own} - {-1}:
            for later in self._graph.asked[lane][: self._answered[lane]]:
                self._waits[later] += 1
            self._room[lane], self._answered[lane], self._taken[lane] = self._graph.room[lane], 0, False
            self._unasked[lane].clear()
            self._queues[lane].clear()
        self.deaths[worker] += 1
        self._events.set(self._now_s + failure.restart_s, self._graph.tasks + worker)

    def _undo(self, task: int) -> None:
        """Stop `task`, or take back what its end released on its own worker."""
        worker, start_s, end_s = self._graph.worker_of[task], self.starts_s[task], self.ends_s[task]
        for later in self._graph.releases(task) if end_s >= 0 else ():
            if self._graph.worker_of[later] == worker:
                self._waits[later] += 1
        if start_s >= 0:
            self.lost.append(LostAttempt(task, start_s, end_s if end_s >= 0 else self._now_s, self.deaths[worker]))
        if self._working[task]:
            self._stop_work(task)
        self._events.drop(task)
        self._polling[task] = False
        self.starts_s[task] = self.ends_s[task] = -1.0
