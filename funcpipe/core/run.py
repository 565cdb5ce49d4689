"""What a function is told when it is invoked, and what it says when it ends."""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from funcpipe.core import checks
from funcpipe.core.life import Life, Outcome
from funcpipe.core.plan import Plan


class Invocation(Protocol):
    """What a function is invoked with: a document that names its run, itself, and its size."""

    FORMAT: ClassVar[str]

    @property
    def run(self) -> str:
        """The run that it belongs to."""

    @property
    def worker(self) -> str:
        """Its short name."""

    @property
    def size(self) -> str:
        """The name of its size."""

    @property
    def memory_mb(self) -> int:
        """The memory of its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The invocation payload: all that a function knows besides what lies in the object storage.

    `storage` and `platform` are URLs: of its objects, and of what runs it. `bundle` is the key of its stage's code,
    loaded only if its SHA-256 is `bundle_sha256`; `parameters` the key of the stage's tensors. A message that has not
    come `message_deadline_s` after it was awaited ends the run. It begins with the stage's newest checkpoint, or else
    with `first_step`; a successor does so when its predecessor has handed over, or `follows_within_s` have passed.
    """

    FORMAT: ClassVar[str] = "funcpipe.worker/1"

    run: str
    attempt: int
    stage: int
    replica: int
    plan: Plan
    storage: str
    platform: str
    bundle: str
    bundle_sha256: str
    parameters: str
    epochs: int
    seed: int
    message_deadline_s: float
    generation: int = 0
    first_step: int = 0
    follows_within_s: float | None = None
    life: Life = field(default_factory=Life)

    def __post_init__(self) -> None:
        checks.filled("run", self.run)
        checks.at_least("attempt", self.attempt, 0)
        checks.at_least("stage", self.stage, 0)
        checks.at_least("replica", self.replica, 0)
        checks.at_least("epochs", self.epochs, 1)
        checks.at_least("first_step", self.first_step, 0)
        checks.positive("message_deadline_s", self.message_deadline_s)

    @property
    def worker(self) -> str:
        """The worker's short name."""
        return f"s{self.stage}.r{self.replica}"

    @property
    def size(self) -> str:
        """The size of its function."""
        return self.plan.stages[self.stage].size

    @property
    def memory_mb(self) -> int:
        """The memory of its function."""
        return self.plan.stages[self.stage].memory_mb


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one replica of the last stage says after a step: its samples, and the sum of their losses."""

    FORMAT: ClassVar[str] = "funcpipe.step/1"

    step: int
    samples: int
    loss_sum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What an attempt of a worker says when it ends: how, what it used, and the tail of its story if it failed.

    `retryable` tells whether another attempt might fare better; `out_of_memory` whether it failed for want of memory.
    """

    FORMAT: ClassVar[str] = "funcpipe.report/1"

    worker: str
    attempt: int
    outcome: Outcome
    started_at_s: float
    ended_at_s: float
    puts: int
    gets: int
    empty_gets: int
    sent_bytes: int
    received_bytes: int
    peak_memory_bytes: int
    task: str | None = None
    error: str | None = None
    traceback: str | None = None
    retryable: bool = False
    out_of_memory: bool = False
    alive_s: float = 0.0
    usd_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What a run took, priced by the platform of its plan."""

    FORMAT: ClassVar[str] = "funcpipe.bill/1"

    platform: str
    functions: int
    function_seconds: float
    puts: int
    gets: int
    compute_usd: float
    request_usd: float

    @property
    def cost_usd(self) -> float:
        """All of it."""
        return self.compute_usd + self.request_usd
