"""Workers on functions, which exchange objects with the server, in this process, through a storage.

After each update the server's parameters are put there once, for all functions. λDNN trains in this way: this process
runs on the machine of the server, and the storage is there too, such as a Redis server's.
"""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from funcpipe.core import RequestCounts, ServerFunctionSpec
from funcpipe.errors import WorkerFailed
from funcpipe.neighbours.parameter_server.function_connection import (
    FunctionConnection,
    FunctionMessage,
    Given,
    Inbox,
    Received,
    ServerKeys,
)
from funcpipe.neighbours.parameter_server.function_pool import FunctionPool
from funcpipe.neighbours.parameter_server.server import ParameterServer, ServerCheckpoints, ServerJob
from funcpipe.neighbours.parameter_server.worker_group import (
    Chunk,
    Lost,
    Progress,
    Push,
    Pushed,
    ServerWorker,
    WorkTimes,
)
from funcpipe.platforms.base import Platform, Storage
from funcpipe.runstate.checkpoints import serialised
from funcpipe.runstate.keys import Keys
from funcpipe.training.batches import Step

_POLL_S = 0.25
_END_WITHIN_S = 20.0
"""The time that functions have to end when ordered to, before they are stopped."""


@dataclass(frozen=True, kw_only=True)
class FunctionSite:
    """The parts of a group: functions like `spec` on `platform`, and `storage`, which signs with the run's key.

    Where one `gathers`, as for synchronous updates, no worker gets work while another hands over in time, which takes a
    cold start: else the rest would have to do all of a step.
    """

    job: ServerJob
    spec: ServerFunctionSpec
    platform: Platform
    storage: Storage
    gathers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionsUsed:
    """A worker's use so far: functions, the seconds billed for them in all, and their storage requests."""

    functions: int = 0
    seconds: float = 0.0
    requests: RequestCounts = field(default_factory=RequestCounts)


class FunctionWorkerGroup:
    """A WorkerGroup of functions. On exit all of them have ended.

    Meanwhile this process computes with one thread, as functions do: sums of several may differ in their last bits.
    """

    def __init__(
        self, site: FunctionSite, workers: Sequence[ServerWorker], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._site, self._first, self._clock = site, tuple(workers), clock
        self._keys = ServerKeys(Keys.of(site.spec))
        self._inbox: Inbox = queue.SimpleQueue()
        self._pool = FunctionPool(site.spec, site.platform, site.storage, self._inbox, clock=clock)
        self._checkpoints = ServerCheckpoints(site.storage, site.spec.run)
        self._versions: list[int] = []
        self._waiting: list[Lost] = []
        self._began_s = clock()
        self._ended_s: float | None = None

    def __enter__(self) -> Self:
        """Put the code where functions find it, start them, and return when they are ready.

        Raises PlatformError, PlatformRefused or WorkerFailed.
        """
        self._began_s, self._threads = self._clock(), torch.get_num_threads()
        torch.set_num_threads(1)
        keys, job = self._keys.keys, self._site.job
        lost = list[Lost]()
        try:
            self._site.storage.put(keys.bundle(0), job.bundle)
            self._site.storage.put(keys.parameters(0), serialised(job.tensors))
            self.restart_server()
            for worker in self._first:
                self.join(worker)
            while not all(slot.is_ready for slot in self._pool.slots.values()):
                event = self.next()
                lost += [event] if isinstance(event, Lost) else []
        except BaseException:
            self._end(stop=True)
            raise
        self._waiting += lost
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(stop=error is not None)

    @property
    def workers(self) -> tuple[ServerWorker, ...]:
        """The workers that may be given work."""
        slots = [slot for slot in self._pool.slots.values() if not slot.leaving]
        if self._site.gathers and any(slot.handing_over or slot.is_closing for slot in slots):
            return ()
        return tuple(slot.worker for slot in slots if slot.is_open)

    @property
    def is_starting(self) -> bool:
        """True while functions are starting, or are about to."""
        return any(not slot.is_open for slot in self._pool.slots.values())

    def join(self, worker: ServerWorker) -> None:
        """Start a worker; it is given work once it has loaded the model."""
        self._pool.join(worker)

    def leave(self, name: str) -> None:
        """Give a worker no more work; it ends what it has."""
        self._pool.leave(name)

    def begin(self, worker: str, chunk: Chunk) -> None:
        """Let a worker pull the parameters as they are now, compute and push."""
        connection = self._pool.slots[worker].connection
        assert connection is not None, "only workers that are ready are given work"
        connection.begin(chunk, self._server.version)

    def next(self) -> Pushed | Lost | None:
        """The next push or loss; None if there is none yet. Raises WorkerFailed for an error that is not retryable."""
        self._waiting += self._pool.poll()
        self._pool.start_due()
        if self._waiting:
            return self._waiting.pop(0)
        try:
            received = self._inbox.get(timeout=_POLL_S)
        except queue.Empty:
            return None
        return self._handle(received)

    def update(self, step: Step, ids: Sequence[int]) -> float:
        """Take a synchronous step; return its mean loss. Raises NotFinite as the recipe says."""
        loss = self._server.update(step, ids)
        self._publish()
        return loss

    def save(self) -> None:
        """Write a checkpoint."""
        self._checkpoints.save(self._server)

    def progress(self) -> Progress:
        """The progress of the server."""
        return self._server.progress()

    def state_dict(self) -> dict[str, Tensor]:
        """The model's `state_dict`."""
        return self._server.state_dict()

    def restart_server(self) -> None:
        """Go on from the newest checkpoint; what functions were given is forgotten."""
        self._server = ParameterServer(self._site.job)
        self._checkpoints.restore_into(self._server)
        for connection in self._pool.connections:
            connection.given.clear()
        self._publish()

    def used(self) -> dict[str, FunctionsUsed]:
        """Each worker's use so far, by name."""
        found: dict[str, FunctionsUsed] = {}
        for connection in self._pool.connections:
            before = found.get(connection.spec.worker, FunctionsUsed())
            found[connection.spec.worker] = FunctionsUsed(
                functions=before.functions + 1,
                seconds=before.seconds + connection.billed_s,
                requests=before.requests + (RequestCounts() if connection.last is None else connection.last.requests),
            )
        return found

    @property
    def lifetime_s(self) -> float:
        """Seconds from the start of the server to its end, or to now."""
        return (self._clock() if self._ended_s is None else self._ended_s) - self._began_s

    def _handle(self, received: Received) -> Pushed | Lost | None:
        connection, message = received.connection, received.message
        if received.error is not None and not connection.over:
            raise received.error
        if connection.over:
            return None
        if message is None:
            return self._pool.ended(connection)
        given = connection.receive(message)
        if message.error is not None:
            return self._failed(connection, message, given)
        pushed = None if given is None or not message.loss_sums else self._take(connection, message, given, received)
        if given is not None and pushed is None:
            connection.given[message.number] = given  # it has left without an answer
        lost = self._pool.answered(connection, message)
        if pushed is not None and lost is not None:
            self._waiting.append(lost)
        return pushed or lost

    def _failed(self, connection: FunctionConnection, message: FunctionMessage, given: Given | None) -> Lost | None:
        reason = message.error or ""
        if message.out_of_memory:
            raise self._pool.out_of_memory(connection, reason)
        if not message.retryable:
            raise WorkerFailed(f"worker {connection.spec.worker} failed: {reason}")
        if given is not None:
            connection.given[message.number] = given
        return self._pool.lose(connection, reason.splitlines()[0])

    def _take(
        self, connection: FunctionConnection, message: FunctionMessage, given: Given, received: Received
    ) -> Pushed:
        push = Push(version=message.version, chunk=given.chunk, vectors=received.vectors, loss_sums=message.loss_sums)
        applied = None
        if given.chunk.separate:
            self._server.collect(push)
        else:
            applied = self._server.apply(push, given.chunk.step)
            if applied is not None:
                self._publish()
        now_s = self._clock()
        rest_s = now_s - given.at_s - message.pull_s - message.compute_s
        times = WorkTimes(pull_s=message.pull_s, compute_s=message.compute_s, push_s=max(rest_s, 0.0))
        return Pushed(worker=connection.spec.worker, chunk=given.chunk, time_s=now_s, applied=applied, times=times)

    def _publish(self) -> None:
        """Store the parameters for the functions, and delete versions that no order needs."""
        version, parameters = self._server.pull()
        if version not in self._versions:
            self._site.storage.put(self._keys.parameters(version), serialised(parameters))
            self._versions.append(version)
        needed = {
            given.version
            for connection in self._pool.connections
            if not connection.over
            for given in connection.given.values()
        }
        old = [each for each in self._versions if each != version and each not in needed]
        self._site.storage.delete_many([self._keys.parameters(each) for each in old])
        self._versions = [each for each in self._versions if each not in old]

    def _end(self, *, stop: bool) -> None:
        """End all functions: at once, or by an order to end."""
        pool = self._pool
        if not stop:
            for connection in pool.connections:
                if not connection.over:
                    connection.end()
            until_s = self._clock() + _END_WITHIN_S
            while any(not connection.over for connection in pool.connections) and self._clock() < until_s:
                self._await_end()
        pool.stop()
        torch.set_num_threads(self._threads)
        self._ended_s = self._clock()

    def _await_end(self) -> None:
        try:
            received = self._inbox.get(timeout=_POLL_S)
        except queue.Empty:
            self._pool.poll()
            return
        if received.message is not None:
            received.connection.receive(received.message)
        if received.message is None or received.message.leaves:
            received.connection.close()
