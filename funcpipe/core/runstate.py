"""The documents that a run keeps in storage: leases, checkpoints, heartbeats, halts, records."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from funcpipe.core import checks
from funcpipe.core.choices import Precision
from funcpipe.core.json_form import IF_CHANGED
from funcpipe.core.plan import Plan
from funcpipe.core.start import StartTimes
from funcpipe.core.stores import CountsByKind, RequestCounts
from funcpipe.core.validation import ValidationReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOrder:
    """An epoch's shards are dealt out to `lanes`; a lane shuffles its samples in windows of `window` shards.

    Sample p of a global batch comes from lane (p // `micro_batch`) mod `lanes`. A run begins with as many lanes as its
    plan has replicas, and with its plan's micro-batches, so that each replica reads a lane of its own. `digest` is of
    the shards' sizes: data that has changed is found out.
    """

    lanes: int
    micro_batch: int
    window: int
    digest: str

    def __post_init__(self) -> None:
        checks.all_at_least(self, 1, "lanes", "micro_batch", "window")


class Outcome(Enum):
    """The outcome of an attempt of a worker."""

    FINISHED = "finished"
    HANDED_OVER = "handed over"
    HALTED = "halted"
    SUPERSEDED = "superseded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint; `name` is relative to the folder of the stage."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """A safetensors file: the object `key` in the storage at `url`, whose first `header_bytes` have the SHA-256
    `header_sha256`.

    Without a URL it is in the storage of a run.
    """

    url: str
    key: str
    header_bytes: int
    header_sha256: str

    @property
    def place(self) -> str:
        """The file in words, without what its URL may hold besides."""
        return f"{self.url.partition('?')[0].rstrip('/')}/{self.key}".removeprefix("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseTensor:
    """A tensor of a Base: the bytes [start, stop) of the file of the number `file`, with that SHA-256 if it is known.

    `dtype` is named as safetensors does.
    """

    file: int
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    sha256: str = field(default="", metadata=IF_CHANGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The tensors that a run does not change, by all names that the model has for them: no checkpoint holds them.

    `transient` are those that are in no `state_dict`.
    """

    FORMAT: ClassVar[str] = "funcpipe.base/1"

    files: tuple[WeightFile, ...] = ()
    tensors: Mapping[str, BaseTensor] = field(default_factory=dict)
    transient: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint of a stage after `step` steps: of all its replicas, or the part that one of them saves.

    `aliases` maps other names of a tensor to the name it is stored under; `transient` names buffers that are not part
    of the model's `state_dict`. `settings` is the JSON text of everything but tensors: the optimiser's state and
    groups, which refer to tensors by name, and the loss scale.
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
    """The object at a lease's key; each attempt to take the lease draws a new `holder` at random.

    With `ended` it is no lease: the holder of the one before has ended the worker for good, in that way.
    """

    FORMAT: ClassVar[str] = "funcpipe.lease/1"

    holder: str
    ended: Outcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerDocument:
    """The statement of the client that owns a run, renewed with every `beat`, every `every_s` seconds.

    `since_at_s` is the time by its own clock. It `watches` if functions train the run without it. Once it is
    `released`, the run has no owner.
    """

    FORMAT: ClassVar[str] = "funcpipe.owner/1"

    who: str
    since_at_s: float
    every_s: float
    beat: int = 0
    watches: bool = False
    released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """The message of an attempt to its successor: it has done `step` steps, and they are saved."""

    FORMAT: ClassVar[str] = "funcpipe.hand-over/1"

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A worker is restarted as `attempt` by a peer that was waiting for it.

    `step` is the step in which the peer was waiting, and `tries` counts the restarts in that step.
    """

    FORMAT: ClassVar[str] = "funcpipe.restart/1"

    attempt: int
    step: int
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """The order to stop after `step` steps, or at once where it is None; `reason` says why.

    An attempt of a worker that gives it names itself; a client does not.
    """

    FORMAT: ClassVar[str] = "funcpipe.halt/1"

    reason: str
    step: int | None = None
    worker: str | None = None
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltVerdict:
    """The validity of an order to stop, as the first worker decided that had to obey it."""

    FORMAT: ClassVar[str] = "funcpipe.halt-verdict/1"

    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMark:
    """The state of a replica after a step: a hash of its parameters, computed by an `attempt` with `instructions`."""

    FORMAT: ClassVar[str] = "funcpipe.replica-mark/1"

    digest: str
    attempt: int
    instructions: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """The activity of a lane for `since_s` seconds; `awaits` is the task whose object it waits for, if any."""

    lane: str
    task: str
    since_s: float
    awaits: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The state of an attempt of a worker, written anew with every `beat`.

    The attempt is billed for `alive_s` so far; `step_s` is the duration of a step. `spent_usd` is what the worker has
    cost, `run_usd` and `run_s` what the run has cost and taken; `run_requests_usd` is what the requests of the
    generation have cost in addition, by this worker's estimate. `requests` are the attempt's own, with this heartbeat,
    and `by_kind` the same for each kind of object; older heartbeats lack it. `run_usd` has the hours of stores.
    `saved_step` is the newest step whose checkpoint the worker knows of; `sent_at_s` is the time by its own clock.
    `instructions` are those of its processor that torch uses. `start` is what its start took, once that is over.
    `device_bytes` is the most that it has used of its accelerator.
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
    instructions: str = ""
    run_requests_usd: float = 0.0
    requests: RequestCounts = field(default_factory=RequestCounts)
    by_kind: CountsByKind | None = None
    start: StartTimes | None = None
    device_bytes: int = field(default=0, metadata=IF_CHANGED)

    @property
    def counts(self) -> CountsByKind:
        """The attempt's requests by kind; those of a heartbeat without kinds are all of the default one."""
        return self.by_kind or CountsByKind(default=self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRef:
    """A generation of a run: a start or a resumption. Its objects lie in `storage`, a URL, and its `seed` is the run's.

    `generation` and `nonce` are parts of the objects' keys.
    """

    run: str
    storage: str
    seed: int
    generation: int = 0
    nonce: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(RunRef):
    """The description of a run: all that is needed to watch it, stop it, or resume it under another plan.

    `platform` is a URL. `losses` and `validations` belong to
    the steps from `began_step` up to `first_step`, which earlier generations did, and of which `skipped_steps` updated
    nothing; `spent_usd` and `elapsed_s` are what those cost and took. The steps before `began_step` were no part of
    this run: it goes on with what a run before it had learned. `lr_schedule`, `average` and `teachers`
    say in words how the learning rate is scheduled, the parameters are averaged, and parts of the model average others;
    `precision` is what the layers compute in; `shard_order` is there if the data lies in shards; `loss_over` says what
    losses are means over, if not over samples. `base` is the SHA-256 of the document of what it does not change.
    """

    FORMAT: ClassVar[str] = "funcpipe.run/1"

    plan: Plan
    platform: str
    samples: int
    epochs: int
    steps: int
    first_step: int
    shuffle: bool
    clip_grad_norm: float | None
    losses: tuple[float, ...] = ()
    spent_usd: float = 0.0
    elapsed_s: float = 0.0
    lr_schedule: str | None = None
    average: str | None = None
    teachers: str | None = None
    loss_over: str | None = None
    began_step: int = 0
    precision: Precision = Precision.FP32
    skipped_steps: tuple[int, ...] = ()
    shard_order: ShardOrder | None = None
    validations: tuple[ValidationReport, ...] = ()
    clip_grad_value: float | None = None
    drop_last: bool = False
    base: str = ""
