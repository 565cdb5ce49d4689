"""The documents that a run keeps in storage: leases, checkpoints, heartbeats, orders, records."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from funcpipe.core import checks
from funcpipe.core.plan import Plan


class Outcome(Enum):
    """How a worker's attempt ended."""

    FINISHED = "finished"
    HANDED_OVER = "handed over"
    HALTED = "halted"
    SUPERSEDED = "superseded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccount:
    """What a run had cost and taken when a function was invoked, and what functions cost a second.

    All functions of the run together cost `run_usd_s`, this one costs `usd_s`.
    """

    spent_usd: float = 0.0
    elapsed_s: float = 0.0
    run_usd_s: float = 0.0
    usd_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("spent_usd", "elapsed_s", "run_usd_s", "usd_s"):
            checks.at_least(name, getattr(self, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint, by its name in the folder of its stage."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint of a stage after `step` steps, the same for all its replicas; or the part that one of them saves.

    `aliases` maps further names of a tensor to the one it is stored under; `transient` names buffers that are no part
    of the model's `state_dict`. `settings` is the JSON text of what is no tensor: the optimiser's state and groups, in
    which tensors are referred to by name, and the scale of the loss.
    """

    FORMAT: ClassVar[str] = "funcpipe.checkpoint/1"

    stage: int
    step: int
    files: tuple[StoredFile, ...]
    aliases: Mapping[str, str]
    transient: tuple[str, ...]
    settings: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseDocument:
    """What lies under a lease's key: `holder` is drawn anew by everyone who tries to take it."""

    FORMAT: ClassVar[str] = "funcpipe.lease/1"

    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """What an attempt leaves to its successor: it has done `step` steps, and they are saved."""

    FORMAT: ClassVar[str] = "funcpipe.hand-over/1"

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """That a worker is started again, as `attempt`, by one that waits for it in `step`: the how-manieth time there."""

    FORMAT: ClassVar[str] = "funcpipe.restart/1"

    attempt: int
    step: int
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """The order to end after `step` steps, or at once; `reason` says why."""

    FORMAT: ClassVar[str] = "funcpipe.halt/1"

    reason: str
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """What a lane does, since when; `awaits` is the task whose object it waits for."""

    lane: str
    task: str
    since_s: float
    awaits: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """How an attempt of a worker fares: `beat` counts up, `alive_s` is its age, `step_s` what a step takes.
    `spent_usd` is what it has cost, `run_usd` and `run_s` what the run has cost and taken.

    `saved_step` is the last step that it knows a checkpoint of; `sent_at_s` is the time by its own clock.
    """

    FORMAT: ClassVar[str] = "funcpipe.heartbeat/1"

    worker: str
    attempt: int
    beat: int
    step: int
    steps: int
    alive_s: float
    step_s: float
    memory_bytes: int
    memory_mb: int
    spent_usd: float
    run_usd: float
    run_s: float
    sent_at_s: float
    saved_step: int = 0
    busy: tuple[Busy, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionDocument:
    """A function that was started: for which attempt of which worker; `handle` is the platform's, as JSON text."""

    FORMAT: ClassVar[str] = "funcpipe.function/1"

    worker: str
    attempt: int
    handle: str
    usd_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run is: all that is needed to watch it, to stop it, or to go on with it under another plan.

    `platform` and `storage` are URLs. `losses` are those of the steps before `first_step`, which earlier generations
    did; `spent_usd` and `elapsed_s` is what these took.
    """

    FORMAT: ClassVar[str] = "funcpipe.run/1"

    run: str
    generation: int
    plan: Plan
    platform: str
    storage: str
    samples: int
    epochs: int
    steps: int
    first_step: int
    seed: int
    shuffle: bool
    clip_grad_norm: float | None
    losses: tuple[float, ...] = ()
    spent_usd: float = 0.0
    elapsed_s: float = 0.0
