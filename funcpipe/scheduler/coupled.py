"""The simulator where tasks slow each other down, or workers die."""

import heapq
import math
from collections.abc import Sequence

import numpy as np

from funcpipe.core import Resource
from funcpipe.scheduler.conditions import Conditions
from funcpipe.scheduler.costs import Costs
from funcpipe.scheduler.pool import Pool
from funcpipe.scheduler.timeline import Lost
from funcpipe.scheduler.wiring import Wiring

_FREE, _CONTENDED = 0, 1
_POOLS = (Resource.COMPUTE, Resource.UPLOAD, Resource.DOWNLOAD)


class Coupled:
    """One play: what waits for a moment, what works in a pool, and what each end releases.

    A transfer first waits for its latency, then moves its bytes in the pool of its direction; a computation works in a
    pool too. Moments are the ends of latencies, and the deaths of workers. A worker that has died loses what it was
    doing and begins again; what it had written stays written.
    """

    def __init__(self, wiring: Wiring, costs: Costs, conditions: Conditions, lanes: Sequence[Resource]) -> None:
        self._wiring = wiring
        self._failures = conditions.failures
        links, kinds = np.unique(costs.link_bytes_s, return_inverse=True)
        self._kind: list[int] = kinds.tolist()
        self._latency: list[float] = costs.seconds.tolist()
        self._bytes: list[float] = costs.body_bytes.tolist()
        transfers = [Pool(links.tolist(), [1.0] * len(links), conditions.shared_bytes_s) for _ in range(2)]
        self._compute = Pool([1.0, 1.0], [1.0, 1.0 / conditions.contention], conditions.shared_cores)
        self._pools = (self._compute, *transfers)
        self._pool_of = [self._pools[_POOLS.index(lane)] for lane in lanes]
        count, workers = len(wiring.waits), len(wiring.workers)
        self._waits = list(wiring.waits)
        self._delivered = [False] * count
        self._moments: list[tuple[float, int, int]] = []  # heap of (when, task or ~failure, attempt)
        self._moving = [0] * workers  # transfers of each worker whose bytes move
        self._computing = [-1] * workers
        self._now_s = 0.0
        self.deaths = [0] * workers
        self.starts_s = [-1.0] * count
        self.ends_s = [-1.0] * count
        self.lost: list[Lost] = []

    def play(self, starting_s: Sequence[float]) -> None:
        """Play to the end, or until nothing moves any more; workers start after `starting_s`."""
        for number, seconds in enumerate(starting_s):
            heapq.heappush(self._moments, (seconds, self._wiring.tasks + number, 0))
        for number, failure in enumerate(self._failures):
            heapq.heappush(self._moments, (failure.at_s, ~number, 0))
        while True:
            pool, after_s, task = self._first_of_pools()
            moment_s = self._moments[0][0] if self._moments else math.inf
            end_s = self._now_s + after_s
            if moment_s == end_s == math.inf:
                return
            if moment_s <= end_s:
                self._pass_until(moment_s)
                self._reach(*heapq.heappop(self._moments)[1:])
            else:
                self._pass_until(end_s)
                pool.leave(task)
                self._left(task, pool)
                self._end(task)

    def _first_of_pools(self) -> tuple[Pool, float, int]:
        ends = [(*pool.next_end(), place) for place, pool in enumerate(self._pools)]
        after_s, task, place = min(ends)
        return self._pools[place], after_s, task

    def _pass_until(self, then_s: float) -> None:
        for pool in self._pools:
            pool.advance(then_s - self._now_s)
        self._now_s = then_s

    def _reach(self, task: int, attempt: int) -> None:
        """What had to wait until now: a worker's death, its start, or a transfer's bytes."""
        if task < 0:
            self._die(~task)
        elif attempt == self.deaths[self._wiring.worker_of[task]]:
            if task < self._wiring.tasks and self._bytes[task]:
                self._pool_of[task].join(task, self._kind[task], self._bytes[task])
                self._move(self._wiring.worker_of[task], +1)
            else:
                self._end(task)

    def _begin(self, task: int) -> None:
        self.starts_s[task] = self._now_s
        worker, seconds = self._wiring.worker_of[task], self._latency[task]
        if self._pool_of[task] is self._compute and seconds:
            self._computing[worker] = task
            self._compute.join(task, _CONTENDED if self._moving[worker] else _FREE, seconds)
        else:
            heapq.heappush(self._moments, (self._now_s + seconds, task, self.deaths[worker]))

    def _left(self, task: int, pool: Pool) -> None:
        """Note that `task` has left `pool`."""
        worker = self._wiring.worker_of[task]
        if pool is self._compute:
            self._computing[worker] = -1
        else:
            self._move(worker, -1)

    def _move(self, worker: int, change: int) -> None:
        """One transfer of `worker` more or less moves bytes: its computation slows down, or recovers."""
        before, self._moving[worker] = self._moving[worker], self._moving[worker] + change
        task = self._computing[worker]
        if task >= 0 and not (before and self._moving[worker]):
            left = self._compute.leave(task)
            self._compute.join(task, _CONTENDED if self._moving[worker] else _FREE, left)

    def _end(self, task: int) -> None:
        self.ends_s[task] = self._now_s
        worker_of = self._wiring.worker_of
        for later in self._wiring.releases[task]:
            if self._delivered[task] and worker_of[later] != worker_of[task]:
                continue
            self._waits[later] -= 1
            if not self._waits[later]:
                self._begin(later)
        self._delivered[task] = True

    def _die(self, number: int) -> None:
        """Undo all that the worker has done, except what others may have read; nothing where it has done all."""
        failure = self._failures[number]
        worker = self._wiring.workers[failure.worker]
        own = [i for i in range(self._wiring.tasks) if self._wiring.worker_of[i] == worker]
        if all(self.ends_s[task] >= 0 for task in own):
            return
        for task in (*own, self._wiring.tasks + worker):
            self._undo(task)
        self._moving[worker], self._computing[worker] = 0, -1
        self.deaths[worker] += 1
        start = (self._now_s + failure.restart_s, self._wiring.tasks + worker, self.deaths[worker])
        heapq.heappush(self._moments, start)

    def _undo(self, task: int) -> None:
        """Take back what the end of `task` released in its own worker, or take it out of its pool."""
        worker, start_s = self._wiring.worker_of[task], self.starts_s[task]
        if self.ends_s[task] >= 0:
            for later in self._wiring.releases[task]:
                if self._wiring.worker_of[later] == worker:
                    self._waits[later] += 1
        if start_s >= 0:
            end_s = self.ends_s[task] if self.ends_s[task] >= 0 else self._now_s
            self.lost.append(Lost(task, start_s, end_s, self.deaths[worker]))
            if task in self._pool_of[task]:
                self._pool_of[task].leave(task)
        self.starts_s[task] = self.ends_s[task] = -1.0
