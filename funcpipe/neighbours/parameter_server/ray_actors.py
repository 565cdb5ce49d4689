"""The Ray actors of the server and the workers."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from funcpipe.neighbours.parameter_server.checkpoints import ServerCheckpoints
from funcpipe.neighbours.parameter_server.link import SharedLink
from funcpipe.neighbours.parameter_server.replica import Replica, ServerJob
from funcpipe.neighbours.parameter_server.server import ParameterServer
from funcpipe.neighbours.parameter_server.values import Chunk, Progress, Push, ServerWorker, WorkTimes
from funcpipe.platforms.base import Storage
from funcpipe.platforms.ray.library import ray
from funcpipe.training.batches import Step

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
