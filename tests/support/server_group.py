"""A parameter server and its workers in this process, by a virtual clock: whole runs without Ray, with losses."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence

from funcpipe.neighbours.parameter_server.server import ParameterServer, Replica, ServerCheckpoints, ServerJob
from funcpipe.neighbours.parameter_server.worker_group import (
    Chunk,
    Lost,
    Progress,
    Push,
    Pushed,
    ServerLost,
    ServerWorker,
)
from funcpipe.platforms.base import Storage
from funcpipe.training.batches import Step


class InTurnWorkerGroup:
    """Workers that compute one after another, but pull and push when machines of their speeds would.

    A sample takes a second divided by a worker's speed. `before_push` is called with the worker's name and how many
    chunks were pushed before; it may call `kill` or `kill_server`.
    """

    def __init__(
        self,
        job: ServerJob,
        storage: Storage,
        run: str,
        workers: Sequence[ServerWorker],
        *,
        before_push: Callable[["InTurnWorkerGroup", str, int], None] = lambda group, worker, pushed: None,
    ) -> None:
        self._job, self._storage, self._run = job, storage, run
        self._checkpoints = ServerCheckpoints(storage, run)
        self._before_push = before_push
        self._replicas: dict[str, Replica] = {}
        self._workers: dict[str, ServerWorker] = {}
        self._leaving: set[str] = set()
        self._given: dict[str, deque[Chunk]] = {}
        self._ends: list[tuple[float, str, Push]] = []
        self._dead: list[str] = []
        self._pushed = 0
        self._server_dead = False
        self.now_s = 0.0
        self.restart_server()
        for worker in workers:
            self.join(worker)

    @property
    def workers(self) -> tuple[ServerWorker, ...]:
        """The workers that may be given work."""
        return tuple(worker for name, worker in self._workers.items() if name not in self._leaving)

    @property
    def is_starting(self) -> bool:
        """False: workers start at once."""
        return False

    def join(self, worker: ServerWorker) -> None:
        """Start a worker."""
        self._workers[worker.name] = worker
        self._given[worker.name] = deque()
        self._replicas[worker.name] = Replica(self._job, self._storage, self._run)

    def leave(self, name: str) -> None:
        """Give a worker no more work."""
        self._leaving.add(name)

    def kill(self, name: str) -> None:
        """Let a worker vanish with all that it was given."""
        if name in self._workers and name not in self._dead:
            self._dead.append(name)

    def kill_server(self) -> None:
        """Let the server vanish with all that it has not saved."""
        self._server_dead = True

    def begin(self, worker: str, chunk: Chunk) -> None:
        """Let a worker pull now, or when it has ended what it was given before."""
        self._check_server()
        self._given[worker].append(chunk)
        if len(self._given[worker]) == 1:
            self._compute(worker)

    def next(self) -> Pushed | Lost | None:
        """The next push by the virtual clock, or loss."""
        while True:
            self._check_server()
            if self._dead:
                name = self._dead.pop()
                del self._workers[name]
                self._ends = [end for end in self._ends if end[1] != name]
                heapq.heapify(self._ends)
                return Lost(worker=name, chunks=tuple(self._given.pop(name)), reason="its machine was taken back")
            if not self._ends:
                return None
            self._before_push(self, self._ends[0][1], self._pushed)
            if not self._dead and not self._server_dead:
                return self._push(*heapq.heappop(self._ends))

    def update(self, step: Step, ids: Sequence[int]) -> float:
        """Let the server take a step; return its mean loss."""
        self._check_server()
        return self.server.update(step, ids)

    def save(self) -> None:
        """Let the server write a checkpoint."""
        self._check_server()
        self._checkpoints.save(self.server)

    def progress(self) -> Progress:
        """The progress of the server."""
        self._check_server()
        return self.server.progress()

    def restart_server(self) -> None:
        """Start a server from the newest checkpoint."""
        self.server = ParameterServer(self._job)
        self._checkpoints.restore_into(self.server)
        self._server_dead = False
        self._ends, self._given = [], {name: deque() for name in self._workers}

    def _check_server(self) -> None:
        if self._server_dead:
            raise ServerLost("its machine failed")

    def _compute(self, name: str) -> None:
        chunk = self._given[name][0]
        version, parameters = self.server.pull()
        push = self._replicas[name].work(version, parameters, chunk)
        samples = sum(len(chunk.step.micro_batches[number]) for number in chunk.numbers)
        heapq.heappush(self._ends, (self.now_s + samples / self._workers[name].speed, name, push))

    def _push(self, end_s: float, name: str, push: Push) -> Pushed:
        self.now_s, self._pushed = end_s, self._pushed + 1
        applied = None
        if push.chunk.separate:
            self.server.collect(push)
        else:
            applied = self.server.apply(push, push.chunk.step)
        self._given[name].popleft()
        if self._given[name]:
            self._compute(name)
        return Pushed(worker=name, chunk=push.chunk, time_s=end_s, applied=applied)
