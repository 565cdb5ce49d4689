"""The workers and the server of a run, as the training loops see them; Ray, functions and tests implement it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from funcpipe.neighbours.parameter_server.values import Chunk, Progress, ServerWorker, WorkTimes
from funcpipe.training.batches import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """A chunk that was computed and has reached the server.

    An asynchronous one was applied, with this mean loss and staleness, unless it had been before. `times` are the
    worker's, where it measures them.
    """

    worker: str
    chunk: Chunk
    time_s: float
    applied: tuple[float, int] | None = None
    times: WorkTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A worker that is gone, with the chunks that it was computing."""

    worker: str
    chunks: tuple[Chunk, ...]
    reason: str


class ServerLost(Exception):  # an event that the loops handle, not an error that a caller sees
    """The server is gone; a new one can be started from the newest checkpoint."""


class WorkerGroup(Protocol):
    """The workers of a run and their server. Every method may raise ServerLost."""

    @property
    def workers(self) -> Sequence[ServerWorker]:
        """The workers that may be given work: neither gone nor about to leave."""

    @property
    def is_starting(self) -> bool:
        """True while workers are starting; `workers` holds them later."""

    def join(self, worker: ServerWorker) -> None:
        """Start a worker."""

    def leave(self, name: str) -> None:
        """Give a worker no more work; it ends what it has."""

    def begin(self, worker: str, chunk: Chunk) -> None:
        """Let a worker pull, compute and push; asynchronously, and after what it was given before."""

    def next(self) -> Pushed | Lost | None:
        """Wait for the next event; None if nothing happens for a while."""

    def update(self, step: Step, ids: Sequence[int]) -> float:
        """Let the server take a synchronous step; return its mean loss."""

    def save(self) -> None:
        """Let the server write a checkpoint."""

    def progress(self) -> Progress:
        """The progress of the server."""

    def restart_server(self) -> None:
        """Start a new server from the newest checkpoint; workers forget what they were given."""
