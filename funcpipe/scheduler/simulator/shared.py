"""The simulator where tasks slow each other down, or workers die."""

import heapq
import math
from collections.abc import Sequence

import numpy as np

from funcpipe.core import Resource
from funcpipe.scheduler.simulator.compiled_graph import CompiledGraph
from funcpipe.scheduler.simulator.costs import Costs
from funcpipe.scheduler.simulator.disturbances import Disturbances
from funcpipe.scheduler.simulator.fair_share import Alarm, FairShare, Unshared
from funcpipe.scheduler.simulator.timeline import Stint

_FREE, _CONTENDED = 0, 1


class Coupled:
    """One play: what waits for a moment, what works in a pool, and what each end releases.

    A transfer first waits for its latency, then moves its bytes in the pool of its direction; a computation works in a
    pool too. A worker that has died loses what it was doing and begins again; what it had written stays written.
    Numbers after those of the tasks stand for the starts of workers, and then for failures.
    """

    def __init__(
        self, wiring: CompiledGraph, costs: Costs, disturbances: Disturbances, lanes: Sequence[Resource]
    ) -> None:
        count, workers = len(wiring.waits), len(wiring.workers)
        self._wiring = wiring
        self._failures = disturbances.failures
        self._alarm = Alarm(count + len(self._failures))
        links, kinds = np.unique(costs.link_bytes_s, return_inverse=True)
        self._kind: list[int] = kinds.tolist()
        self._seconds: list[float] = costs.seconds.tolist()
        self._bytes: list[float] = costs.body_bytes.tolist()
        self._compute = self._pool([1.0, 1.0], [1.0, 1.0 / disturbances.contention], disturbances.shared_cores)
        pools = {lane: self._pool(links.tolist(), [1.0] * len(links), disturbances.shared_bytes_s) for lane in Resource}
        pools[Resource.COMPUTE] = self._compute
        self._pool_of = [pools[lane] for lane in lanes]
        self._shared = [pool for pool in pools.values() if isinstance(pool, FairShare)]
        self._waits = list(wiring.waits)
        self._working = [False] * count
        self._taken = [False] * wiring.lanes
        self._queues: list[list[int]] = [[] for _ in range(wiring.lanes)]  # heaps of those that wait for their lane
        self._delivered = [False] * count
        self._moving = [0] * workers  # transfers of each worker whose bytes move
        self._computing = [-1] * workers
        self._now_s = 0.0
        self.deaths = [0] * workers
        self.starts_s = [-1.0] * count
        self.ends_s = [-1.0] * count
        self.lost: list[Stint] = []

    def _pool(self, limits: Sequence[float], factors: Sequence[float], capacity: float | None) -> FairShare | Unshared:
        return Unshared(limits, factors, self._alarm) if capacity is None else FairShare(limits, factors, capacity)

    def play(self, starting_s: Sequence[float]) -> None:
        """Play to the end, or until nothing moves any more; workers start after `starting_s`."""
        alarm, count = self._alarm, len(self._wiring.waits)
        for number, seconds in enumerate(starting_s):
            alarm.set(seconds, self._wiring.tasks + number)
        for number, failure in enumerate(self._failures):
            alarm.set(failure.at_s, count + number)
        while True:
            then_s, pool = alarm.next_s(), None
            for candidate in self._shared:
                if candidate.next_end_s < then_s:
                    then_s, pool = candidate.next_end_s, candidate
            if then_s == math.inf:
                return
            self._now_s = then_s
            task = alarm.take() if pool is None else pool.next_task
            if task < count:
                self._reach(task)
            else:
                self._die(task - count)

    def _reach(self, task: int) -> None:
        """A task, or the start of a worker, has come to the end of what it did: its latency, or its work."""
        if self._working[task]:
            self._stop_work(task)
            self._end(task)
        elif self._wiring.open[task]:
            self._queue(task)
        else:
            self._move_body(task)

    def _begin(self, task: int) -> None:
        """All that `task` needs has ended."""
        if self._wiring.open[task]:
            self.starts_s[task] = self._now_s
            self._alarm.set(self._now_s + self._seconds[task], task)
        else:
            self._queue(task)

    def _queue(self, task: int) -> None:
        """Wait for the lane, where others may have it."""
        lane = self._wiring.lane[task]
        if lane < 0:
            self._start(task)
            return
        heapq.heappush(self._queues[lane], task)
        if not self._taken[lane]:
            self._next_on(lane)

    def _next_on(self, lane: int) -> None:
        self._taken[lane] = bool(self._queues[lane])
        if self._taken[lane]:
            self._start(heapq.heappop(self._queues[lane]))

    def _start(self, task: int) -> None:
        """`task` has its lane."""
        if self._wiring.open[task]:
            self._move_body(task)
            return
        self.starts_s[task] = self._now_s
        worker, seconds = self._wiring.worker_of[task], self._seconds[task]
        if self._pool_of[task] is self._compute and seconds:
            self._computing[worker] = task
            self._start_work(task, _CONTENDED if self._moving[worker] else _FREE, seconds)
        else:
            self._alarm.set(self._now_s + seconds, task)

    def _move_body(self, task: int) -> None:
        if task < self._wiring.tasks and self._bytes[task]:
            self._start_work(task, self._kind[task], self._bytes[task])
            self._move(self._wiring.worker_of[task], +1)
        else:
            self._end(task)

    def _start_work(self, task: int, kind: int, work: float) -> None:
        self._working[task] = True
        self._pool_of[task].join(task, kind, work, self._now_s)

    def _stop_work(self, task: int) -> None:
        worker, pool = self._wiring.worker_of[task], self._pool_of[task]
        self._working[task] = False
        pool.leave(task, self._now_s)
        if pool is self._compute:
            self._computing[worker] = -1
        else:
            self._move(worker, -1)

    def _move(self, worker: int, change: int) -> None:
        """One transfer of `worker` more or less moves bytes: its computation slows down, or recovers."""
        before = self._moving[worker]
        after = self._moving[worker] = before + change
        task = self._computing[worker]
        if task >= 0 and not (before and after):
            left = self._compute.leave(task, self._now_s)
            self._compute.join(task, _CONTENDED if after else _FREE, left, self._now_s)

    def _end(self, task: int) -> None:
        self.ends_s[task] = self._now_s
        waits, worker_of, again = self._waits, self._wiring.worker_of, self._delivered[task]
        for later in self._wiring.releases(task):
            if again and worker_of[later] != worker_of[task]:
                continue
            waits[later] -= 1
            if not waits[later]:
                self._begin(later)
        self._delivered[task] = True
        if (lane := self._wiring.lane[task]) >= 0:
            self._next_on(lane)

    def _die(self, number: int) -> None:
        """Undo all that the worker has done, except what others may have read; nothing where it has done all."""
        failure = self._failures[number]
        worker = self._wiring.workers[failure.worker]
        own = [i for i in range(len(self._wiring.waits)) if self._wiring.worker_of[i] == worker]
        if all(self.ends_s[task] >= 0 for task in own):
            return
        for task in own:
            self._undo(task)
        for lane in {self._wiring.lane[task] for task in own} - {-1}:
            self._taken[lane] = False
            self._queues[lane].clear()
        self.deaths[worker] += 1
        self._alarm.set(self._now_s + failure.restart_s, self._wiring.tasks + worker)

    def _undo(self, task: int) -> None:
        """Take back what the end of `task` released in its own worker, or let it stop."""
        worker, start_s, end_s = self._wiring.worker_of[task], self.starts_s[task], self.ends_s[task]
        for later in self._wiring.releases(task) if end_s >= 0 else ():
            if self._wiring.worker_of[later] == worker:
                self._waits[later] += 1
        if start_s >= 0:
            self.lost.append(Stint(task, start_s, end_s if end_s >= 0 else self._now_s, self.deaths[worker]))
        if self._working[task]:
            self._stop_work(task)
        self._alarm.drop(task)
        self.starts_s[task] = self.ends_s[task] = -1.0
