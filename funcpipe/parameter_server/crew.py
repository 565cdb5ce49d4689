"""The workers and the server of a run, as the loops of training see them: what Ray does, and tests without it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from funcpipe.parameter_server.values import Chunk, Progress, ServerWorker, WorkTimes
from funcpipe.training.data import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """A chunk has been computed, and is with the server.

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
    """A worker is gone, and with it what it was computing."""

    worker: str
    chunks: tuple[Chunk, ...]
    reason: str


class ServerLost(Exception):  # an event that the loops handle, not an error that a caller sees
    """The server is gone; a new one can be started from the newest checkpoint."""


class Crew(Protocol):
    """Who computes. Every method may raise ServerLost."""

    @property
    def workers(self) -> Sequence[ServerWorker]:
        """Those that may be given work: neither gone nor about to leave."""

    @property
    def awaits(self) -> bool:
        """Whether workers are starting, which `workers` holds later."""

    def join(self, worker: ServerWorker) -> None:
        """Start a worker."""

    def leave(self, name: str) -> None:
        """Give a worker no more work; it ends what it has."""

    def begin(self, worker: str, chunk: Chunk) -> None:
        """Let a worker pull, compute and push; asynchronously, and after what it was given before."""

    def next(self) -> Pushed | Lost | None:
        """Wait for what happens next; None if nothing did for a while."""

    def update(self, step: Step, ids: Sequence[int]) -> float:
        """Let the server take a synchronous step; its mean loss."""

    def save(self) -> None:
        """Let the server write a checkpoint."""

    def progress(self) -> Progress:
        """How far the server has come."""

    def restart_server(self) -> None:
        """Start a new server from the newest checkpoint; workers forget what they were given."""
