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

    `aliases` maps further names of a tensor to the one it is stored under; `transient` names buffers that are not part
    of the model's `state_dict`. `settings` is the JSON text of all but the tensors: the optimiser's state and groups,
    which refer to tensors by name, and the scale of the loss.
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
    """The content of a lease: `holder` is a random name, a new one for each function that tries to take the lease."""

    FORMAT: ClassVar[str] = "funcpipe.lease/1"

    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """What an attempt tells its successor when it leaves: `step` steps are done and saved."""

    FORMAT: ClassVar[str] = "funcpipe.hand-over/1"

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A worker is restarted as `attempt` by one that waits for it in `step`; it is restart `tries` in that step."""

    FORMAT: ClassVar[str] = "funcpipe.restart/1"

    attempt: int
    step: int
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """The order to end the run after `step` steps, or at once if that is None; `reason` says why."""

    FORMAT: ClassVar[str] = "funcpipe.halt/1"

    reason: str
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """What a lane has been doing for `since_s` seconds; `awaits` is the task whose object it waits for."""

    lane: str
    task: str
    since_s: float
    awaits: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What an attempt of a worker is doing: heartbeat number `beat`, when it was `alive_s` old.

    A step takes it `step_s`. It has cost `spent_usd`; the run has cost `run_usd` and taken `run_s`. `saved_step` is the
    last step that it knows a checkpoint of; `sent_at_s` is the time by its own clock.
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
    """A function that was started for an attempt of a worker; `handle` is the platform's, as JSON text."""

    FORMAT: ClassVar[str] = "funcpipe.function/1"

    worker: str
    attempt: int
    handle: str
    usd_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """All that is needed to watch a run, to stop it, or to resume it by another plan.

    `platform` and `storage` are URLs. Earlier generations have done the steps before `first_step`: `losses` are the
    losses of those steps, `spent_usd` and `elapsed_s` are what they cost and took.
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
