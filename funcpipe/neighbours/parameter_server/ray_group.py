"""Workers on Ray: the server is an actor, and so is each worker; gradients go from one to the other.

Workers ask the server for the parameters and push to it themselves. The client only deals out the work, and learns
from Ray which workers are gone. Where machines stand for others with slower networks, `SharedLink` delays transfers.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from funcpipe.errors import FuncPipeError, PlatformRefused, WorkerFailed
from funcpipe.neighbours.parameter_server.server import ParameterServer, Replica, ServerCheckpoints, ServerJob
from funcpipe.neighbours.parameter_server.worker_group import (
    Chunk,
    Lost,
    Progress,
    Push,
    Pushed,
    ServerLost,
    ServerWorker,
    WorkTimes,
)
from funcpipe.platforms.base import Storage
from funcpipe.platforms.ray.library import ray
from funcpipe.training.batches import Step

_QUANTA = 16


class SharedLink:
    """A delay of transfers, as on a link of `bytes_s` bytes a second that they share evenly.

    A transfer moves in small pieces, one after another, and so takes turns with those of other threads. Without
    `bytes_s` it delays nothing by itself.
    """

    def __init__(
        self,
        bytes_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_s = bytes_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_s = 0.0

    def transfer(self, size: int, own_bytes_s: float | None = None) -> None:
        """Return once `size` bytes would have passed, over this link and over the other end's, of `own_bytes_s`."""
        if self._bytes_s is None and own_bytes_s is None:
            return
        piece, passed_s = size / _QUANTA, self._clock()
        for _ in range(_QUANTA):
            alone_s = passed_s + (piece / own_bytes_s if own_bytes_s else 0.0)
            passed_s = max(alone_s, self._reserve(piece, passed_s))
            self._sleep(max(passed_s - self._clock(), 0.0))

    def _reserve(self, size: float, now_s: float) -> float:
        """Return when the link will have moved the next `size` bytes."""
        if self._bytes_s is None:
            return now_s
        with self._lock:
            self._free_s = max(self._free_s, now_s) + size / self._bytes_s
            return self._free_s


OpenStorageHere = Callable[[], Storage]
"""A function that opens the run's storage on the machine that calls it."""


@dataclass(frozen=True, kw_only=True)
class RaySite:
    """The parts of actors. The server's node must have `server_resources`, and its link has `link_bytes_s`."""

    job: ServerJob
    open_storage: OpenStorageHere
    run: str
    server_resources: Mapping[str, float] = field(default_factory=dict)
    link_bytes_s: float | None = None


class ServerActor:
    """The actor of the server; several threads run its methods, so that workers share its link."""

    def __init__(self, site: RaySite) -> None:
        _one_thread()
        self._server = ParameterServer(site.job)
        self._checkpoints = ServerCheckpoints(site.open_storage(), site.run)
        self._checkpoints.restore_into(self._server)
        self._link = SharedLink(site.link_bytes_s)

    def pull(self, own_bytes_s: float | None) -> tuple[int, dict[str, Tensor]]:
        """The version and the parameters, once they would have passed the links."""
        found = self._server.pull()
        self._link.transfer(self._server.parameter_bytes, own_bytes_s)
        return found

    def push(self, push: Push, own_bytes_s: float | None) -> tuple[float, int] | None:
        """Take gradients; return the mean loss and the staleness of an asynchronous push that is new."""
        self._link.transfer(sum(vector.nbytes for vector in push.vectors), own_bytes_s)
        if not push.chunk.separate:
            return self._server.apply(push, push.chunk.step)
        self._server.collect(push)
        return None

    def update(self, step: Step, ids: Sequence[int]) -> float:
        """Take a synchronous step; return its mean loss."""
        return self._server.update(step, ids)

    def save(self) -> None:
        """Write a checkpoint."""
        self._checkpoints.save(self._server)

    def progress(self) -> Progress:
        """The progress of the server."""
        return self._server.progress()

    def state_dict(self) -> dict[str, Tensor]:
        """The model's `state_dict`."""
        return self._server.state_dict()


class WorkerActor:
    """The actor of a worker."""

    def __init__(self, site: RaySite, worker: ServerWorker) -> None:
        _one_thread()
        self._worker = worker
        self._replica = Replica(site.job, site.open_storage(), site.run)

    def ready(self) -> None:
        """Return once the model is loaded."""

    def work(self, server: Any, chunk: Chunk) -> tuple[tuple[float, int] | None, WorkTimes]:
        """Pull, compute and push a chunk; return what `push` returned, and the times."""
        own = self._worker.link_bytes_s
        asked_s = time.monotonic()
        version, parameters = ray.get(server.pull.remote(own))
        began_s = time.monotonic()
        push = self._replica.work(version, parameters, chunk)
        samples = sum(len(chunk.step.micro_batches[number]) for number in chunk.numbers)
        time.sleep(max(self._worker.sample_s * samples - (time.monotonic() - began_s), 0.0))
        ended_s = time.monotonic()
        applied: tuple[float, int] | None = ray.get(server.push.remote(push, own))
        times = WorkTimes(pull_s=began_s - asked_s, compute_s=ended_s - began_s, push_s=time.monotonic() - ended_s)
        return applied, times


def _one_thread() -> None:
    """Compute as functions do: sums of several threads may differ in their last bits."""
    import torch

    torch.set_num_threads(1)


_POLL_S = 0.5
_SERVER_THREADS = 64


@dataclass(frozen=True, kw_only=True)
class _Pending:
    worker: str
    chunk: Chunk


class RayWorkerGroup:
    """A WorkerGroup of Ray actors, which end with it; needs a connection to Ray."""

    def __init__(
        self, site: RaySite, workers: Sequence[ServerWorker], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._site, self._clock, self._first = site, clock, tuple(workers)
        self._actors: dict[str, Any] = {}
        self._workers: dict[str, ServerWorker] = {}
        self._starting: dict[Any, ServerWorker] = {}
        self._leaving: set[str] = set()
        self._pending: dict[Any, _Pending] = {}
        self._lost: deque[Lost] = deque()
        self._server: Any = None
        self._began_s = self._clock()
        self._ended_s: float | None = None
        self._presence: dict[str, tuple[ServerWorker, float, float | None]] = {}

    def __enter__(self) -> Self:
        """Start the server and the workers. Raises PlatformRefused where Ray would wait for more nodes for ever."""
        self._check_room()
        self._began_s = self._clock()
        self.restart_server()
        for worker in self._first:
            self.join(worker)
        try:
            ray.wait(list(self._starting), num_returns=len(self._starting))
            self._admit()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    @property
    def workers(self) -> tuple[ServerWorker, ...]:
        """The workers that may be given work: they have loaded the model, and are neither gone nor about to leave."""
        self._admit()
        return tuple(worker for name, worker in self._workers.items() if name not in self._leaving)

    @property
    def is_starting(self) -> bool:
        """True while workers are starting."""
        return bool(self._starting)

    def join(self, worker: ServerWorker) -> None:
        """Start a worker, as soon as a node has room for it; it is given work once it has loaded the model."""
        made = ray.remote(WorkerActor).options(num_cpus=1, resources=dict(worker.resources) or None, max_restarts=0)
        actor = self._actors[worker.name] = made.remote(self._site, worker)
        self._starting[actor.ready.remote()] = worker
        self._presence[worker.name] = worker, self._clock(), None

    def _check_room(self) -> None:
        needed = Counter(self._site.server_resources)
        for worker in self._first:
            needed.update(worker.resources)
        needed["CPU"] = len(self._first)
        offered = ray.cluster_resources()
        for name, count in needed.items():
            if count > offered.get(name, 0.0):
                raise PlatformRefused(
                    f"the server and {len(self._first)} workers need {count:g} of the resource {name}, and all nodes "
                    f"of Ray offer {offered.get(name, 0.0):g}; add nodes that have it, see docs/parameter_server.md"
                )

    def _admit(self) -> None:
        """Admit the workers that are ready by now. Raises what their start raises, unless they are gone."""
        if not self._starting:
            return
        ready, _ = ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
        for ref in ready:
            worker = self._starting.pop(ref)
            try:
                ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                raise _ours(worker.name, error) from error
            except ray.exceptions.RayActorError as error:
                self._lost.append(Lost(worker=worker.name, chunks=(), reason=_line(error)))
                self._forget(worker.name)
            else:
                self._workers[worker.name] = worker

    def leave(self, name: str) -> None:
        """Give a worker no more work; it is ended when it has done what it was given."""
        self._leaving.add(name)
        self._end_idle()

    def begin(self, worker: str, chunk: Chunk) -> None:
        """Let a worker pull, compute and push."""
        ref = self._actors[worker].work.remote(self._server, chunk)
        self._pending[ref] = _Pending(worker=worker, chunk=chunk)

    def next(self) -> Pushed | Lost | None:
        """The next push or loss; None after half a second without any. Raises what a worker's computation raises."""
        if self._lost:
            return self._lost.popleft()
        awaited = [*self._pending, *self._starting]
        ready, _ = ray.wait(awaited, num_returns=1, timeout=_POLL_S) if awaited else ([], [])
        if not ready or ready[0] in self._starting:
            return None
        pending = self._pending.pop(ready[0])
        try:
            applied, times = ray.get(ready[0])
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ray.exceptions.RayActorError):
                raise ServerLost(_line(error.cause)) from error
            raise _ours(pending.worker, error) from error
        except ray.exceptions.RayActorError as error:
            return self._gone(pending, _line(error))
        self._end_idle()
        return Pushed(worker=pending.worker, chunk=pending.chunk, time_s=self._clock(), applied=applied, times=times)

    def update(self, step: Step, ids: Sequence[int]) -> float:
        """Let the server take a synchronous step; return its mean loss."""
        return float(self._ask("update", step, ids))

    def save(self) -> None:
        """Let the server write a checkpoint."""
        self._ask("save")

    def progress(self) -> Progress:
        """The progress of the server."""
        progress: Progress = self._ask("progress")
        return progress

    def state_dict(self) -> dict[str, Tensor]:
        """The model's `state_dict`."""
        return dict(self._ask("state_dict"))

    def presence(self) -> dict[str, tuple[ServerWorker, float]]:
        """All workers so far, by name, with the seconds that each was present."""
        now_s = self._clock()
        return {
            name: (worker, (now_s if end_s is None else end_s) - began_s)
            for name, (worker, began_s, end_s) in self._presence.items()
        }

    @property
    def lifetime_s(self) -> float:
        """Seconds from the start of the server to its end, or to now."""
        return (self._clock() if self._ended_s is None else self._ended_s) - self._began_s

    def restart_server(self) -> None:
        """Start a server from the newest checkpoint, with workers that have nothing to do."""
        for pending in self._pending:
            ray.cancel(pending)
        self._pending = {}
        made = ray.remote(ServerActor).options(
            num_cpus=0,
            resources=dict(self._site.server_resources) or None,
            max_restarts=0,
            max_concurrency=_SERVER_THREADS,
        )
        self._server = made.remote(self._site)

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._server, method).remote(*arguments))
        except ray.exceptions.RayTaskError as error:
            raise _ours("the parameter server", error) from error
        except ray.exceptions.RayActorError as error:
            raise ServerLost(_line(error)) from error

    def _gone(self, pending: _Pending, reason: str) -> Lost:
        mine = [ref for ref, other in self._pending.items() if other.worker == pending.worker]
        chunks = (pending.chunk, *(self._pending.pop(ref).chunk for ref in mine))
        self._forget(pending.worker)
        return Lost(worker=pending.worker, chunks=chunks, reason=reason)

    def _end_idle(self) -> None:
        busy = {pending.worker for pending in self._pending.values()}
        for name in self._leaving & self._workers.keys() - busy:
            ray.kill(self._actors[name])
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._workers.pop(name, None)
        self._actors.pop(name, None)
        self._leaving.discard(name)
        self._presence[name] = *self._presence[name][:2], self._clock()

    def _end(self) -> None:
        self._starting = {}
        for name in tuple(self._actors):
            ray.kill(self._actors[name])
            self._forget(name)
        if self._server is not None:
            ray.kill(self._server)
            self._server = None
            self._ended_s = self._clock()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _ours(where: str, error: ray.exceptions.RayTaskError) -> FuncPipeError:
    """The FuncPipeError that a task raised, or else WorkerFailed with its text."""
    cause = error.cause
    return cause if isinstance(cause, FuncPipeError) else WorkerFailed(f"{where} failed: {_line(cause)}")
