"""The workers and the server of a run as the training loops see them, and the values that they exchange.

Ray, functions and tests implement `WorkerGroup`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from torch import Tensor

from funcpipe.core import checks
from funcpipe.training.batches import Step


class Updates(Enum):
    """The time of the server's updates.

    BSP, bulk synchronous parallel: once all gradients of a global batch are there. ASP, asynchronous parallel: with
    each push, however old the parameters are that it was computed with.
    """

    BSP = "bsp"
    ASP = "asp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerWorker:
    """A machine that computes gradients.

    `speed` is relative to the other workers. `push` is how many micro-batches an asynchronous worker sums before it
    pushes. `resources` are what Ray must have free on its node, besides a processor. `sample_s` and `link_bytes_s`
    make it at least as slow as another machine: seconds for a sample, bytes a second to and from the server.
    """

    name: str
    machine: str = ""
    speed: float = 1.0
    push: int = 1
    spot: bool = False
    resources: Mapping[str, float] = field(default_factory=dict)
    sample_s: float = 0.0
    link_bytes_s: float | None = None

    def __post_init__(self) -> None:
        checks.positive("speed", self.speed)
        checks.whole("push", self.push, 1)
        checks.at_least("sample_s", self.sample_s, 0)
        if self.link_bytes_s is not None:
            checks.positive("link_bytes_s", self.link_bytes_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Micro-batches for one worker: `numbers` of `step`, and the `ids` that name them within the run.

    They are pushed one by one where they are `separate`, so that the server can add them in order; else as one sum.
    """

    step: Step
    numbers: tuple[int, ...]
    ids: tuple[int, ...]
    separate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Gradients: flat vectors (see `training.gradients`), each with the sum of the losses of its samples.

    `version` is how many updates the parameters had seen that they were computed with.
    """

    version: int
    chunk: Chunk
    vectors: tuple[Tensor, ...]
    loss_sums: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a server: updates, samples, and the ids applied, all `below` a number and some `beyond` it."""

    version: int
    samples: int
    below: int
    beyond: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTimes:
    """The seconds that a worker took for a chunk: until it had the parameters, the gradients, and had pushed them."""

    pull_s: float
    compute_s: float
    push_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRecord:
    """The outcome of an asynchronous push. `staleness` counts the updates since its parameters were pulled.

    `iterations` are normalised: the samples applied so far, in units of the mean push, as spotDNN counts them.
    """

    worker: str
    samples: int
    loss: float
    staleness: int
    iterations: float
    time_s: float = 0.0


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
