"""The payloads of functions when they are invoked, and the reports of workers after steps and when they end."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from funcpipe.core import checks
from funcpipe.core.bill import Bill, RunAccount
from funcpipe.core.json_form import IF_CHANGED
from funcpipe.core.plan import Plan
from funcpipe.core.runstate import Outcome, RunRef
from funcpipe.core.settings import FaultTolerance, RunLimits
from funcpipe.core.start import StartTimes
from funcpipe.core.stores import CountsByKind, RequestCounts
from funcpipe.core.texts import worker_name
from funcpipe.core.validation import ValidationReport
from funcpipe.errors import InvalidValue


class Invocation(Protocol):
    """The payload that a function is invoked with; it names the run, the worker and the size of the function."""

    FORMAT: ClassVar[str]

    @property
    def run(self) -> str:
        """The name of the run."""

    @property
    def worker(self) -> str:
        """The short name of the worker."""

    @property
    def attempt(self) -> int:
        """The number of the attempt of the worker."""

    @property
    def size(self) -> str:
        """The name of the function's size."""

    @property
    def memory_mb(self) -> int:
        """The memory of the function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec(RunRef):
    """The part that the payloads of a run's functions share.

    The function's code is loaded only if its SHA-256 is `bundle_sha256`. `message_deadline_s` is how long the run waits
    for a message. `log_level` is what `core.logs.read_levels` reads, and `run_key` the text of the run's RunKey, which
    is in no payload that lies in storage. It was `invoked_at_s`, by the clock of who invoked it; 0 is unknown.
    """

    attempt: int
    bundle_sha256: str
    message_deadline_s: float
    log_level: str = "INFO"
    run_key: str = field(default="", repr=False)
    invoked_at_s: float = field(default=0.0, compare=False, metadata=IF_CHANGED)

    def __post_init__(self) -> None:
        checks.filled("run", self.run)
        checks.at_least("attempt", self.attempt, 0)
        checks.positive("message_deadline_s", self.message_deadline_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(FunctionSpec):
    """The payload of a worker's function: all that it knows besides what is in the object storage.

    `platform` is the URL of what runs the run's functions, `bundle` the key of the stage's code, and `parameters` that
    of its tensors. The worker starts from the stage's newest checkpoint, or at `first_step` if there is none; a
    successor starts once its predecessor has handed over, or after `follows_within_s`. With no `epochs` it only
    evaluates. The run began after `began_step` steps, and `validated` is the last validation of earlier generations.
    `account` is what the run had cost and taken. Trials of a sweep share code and data: these are those of the run
    `shared`, if it is named, and `recipe` is then how this run learns, in the place of what the code says. The first
    function of the worker hands over after `first_life` of its lifetime, as a share. The stage computes on its
    function's accelerator if it has `device_memory_mb` of that. Where stores take so many requests a second, they take
    all those that the run makes at once in `crowd_s`.
    """

    FORMAT: ClassVar[str] = "funcpipe.worker/1"

    stage: int
    replica: int
    plan: Plan
    platform: str
    bundle: str
    parameters: str
    epochs: int
    first_step: int = 0
    follows_within_s: float | None = None
    faults: FaultTolerance = field(default_factory=FaultTolerance)
    limits: RunLimits = field(default_factory=RunLimits)
    account: RunAccount = field(default_factory=RunAccount)
    began_step: int = 0
    validated: ValidationReport | None = None
    shared: str = ""
    recipe: str = field(default="", repr=False)
    first_life: float = field(default=1.0, metadata=IF_CHANGED)
    device_memory_mb: int | None = field(default=None, metadata=IF_CHANGED)
    crowd_s: float | None = field(default=None, metadata=IF_CHANGED)

    def __post_init__(self) -> None:
        FunctionSpec.__post_init__(self)
        checks.positive("first_life", self.first_life)
        checks.all_at_least(self, 0, "stage", "replica", "epochs", "first_step")

    @property
    def worker(self) -> str:
        """The worker's short name, such as s0.r1."""
        return worker_name(self.stage, self.replica)

    @property
    def is_first(self) -> bool:
        """True for the worker that does what one worker does for the whole run."""
        return self.stage == self.replica == 0

    @property
    def size(self) -> str:
        """The size of its function."""
        return self.plan.stages[self.stage].size

    @property
    def memory_mb(self) -> int:
        """The memory of its function."""
        return self.plan.stages[self.stage].memory_mb

    @property
    def accelerated(self) -> frozenset[int]:
        """Its own stage, if that computes on an accelerator; of others it does not know."""
        return frozenset() if self.device_memory_mb is None else frozenset({self.stage})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The report of one replica of the last stage after a step: its samples, and the sum of their losses.

    `skipped` says that no parameter was updated, as gradients were not finite. `learning_rate` is that of the
    optimiser's first group in the step; None if the stage trains no parameters, or the optimiser has no such rate.
    """

    FORMAT: ClassVar[str] = "funcpipe.step/1"

    step: int
    samples: int
    loss_sum: float
    skipped: bool = False
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """The reports of many steps of one replica of the last stage, in columns of equal length, and those `skipped`.

    `learning_rates` is empty if no report has one.
    """

    FORMAT: ClassVar[str] = "funcpipe.steps/1"

    steps: tuple[int, ...]
    samples: tuple[int, ...]
    loss_sums: tuple[float, ...]
    skipped: tuple[int, ...] = ()
    learning_rates: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.steps) == len(self.samples) == len(self.loss_sums):
            lengths = len(self.steps), len(self.samples), len(self.loss_sums)
            raise InvalidValue("steps", lengths, "must have as many entries as samples and loss_sums")
        if len(self.learning_rates) not in (0, len(self.steps)):
            raise InvalidValue("learning_rates", len(self.learning_rates), "must be as many as steps, or none")

    @classmethod
    def of(cls, reports: Iterable[StepReport]) -> "StepSummary":
        """Return the summary of `reports`, in the order of their steps."""
        ordered = sorted(reports, key=lambda report: report.step)
        rates = tuple(report.learning_rate for report in ordered)
        return cls(
            steps=tuple(report.step for report in ordered),
            samples=tuple(report.samples for report in ordered),
            loss_sums=tuple(report.loss_sum for report in ordered),
            skipped=tuple(report.step for report in ordered if report.skipped),
            learning_rates=rates if any(rate is not None for rate in rates) else (),
        )

    def reports(self) -> dict[int, StepReport]:
        """Return the reports by step."""
        skipped, rates = frozenset(self.skipped), self.learning_rates or (None,) * len(self.steps)
        return {
            step: StepReport(step=step, samples=samples, loss_sum=total, skipped=step in skipped, learning_rate=rate)
            for step, samples, total, rate in zip(self.steps, self.samples, self.loss_sums, rates, strict=True)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """The report of an attempt of a worker when it ends: its outcome, its usage, and the error if it failed.

    `retryable` says whether another attempt may succeed; `out_of_memory` whether the failure was a lack of memory.
    It is billed for `alive_s`; `uses` says what these seconds went to, by the names of `Use`. Its first step was
    `first_step`, None if it never came so far. `instructions` are those of its processor that torch used. `by_kind` are
    its requests for each kind of object, and `start` is what its start took. `peak_device_bytes` is the most that it
    used of an accelerator, with what the driver is taken to need; `exhausted_device_mb` is what it had of one whose
    memory was used up.
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
    instructions: str = ""
    lists: int = 0
    by_kind: CountsByKind | None = None
    uses: Mapping[str, float] = field(default_factory=dict, hash=False)
    first_step: int | None = None
    start: StartTimes | None = None
    peak_device_bytes: int = field(default=0, metadata=IF_CHANGED)
    exhausted_device_mb: int | None = field(default=None, metadata=IF_CHANGED)

    @property
    def counts(self) -> CountsByKind:
        """The attempt's storage requests by kind; those of a report without kinds are of the default one."""
        return self.by_kind or CountsByKind(
            default=RequestCounts(**{item.name: getattr(self, item.name) for item in dataclasses.fields(RequestCounts)})
        )

    @property
    def is_final(self) -> bool:
        """True if the worker is to have no other attempt after this one."""
        if self.outcome is Outcome.FAILED:
            return not self.retryable and not self.out_of_memory
        return self.outcome in (Outcome.FINISHED, Outcome.HALTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """The part of a finished run that is kept, beside its record, its last checkpoint and its trace.

    `losses` are those of all its steps, of which `skipped_steps` updated nothing. `bill` lacks the last requests of the
    client that made it. The run took `elapsed_s`. The files of the last checkpoint, with the optimiser's state, have
    `kept_bytes`.
    """

    FORMAT: ClassVar[str] = "funcpipe.finished/1"

    losses: tuple[float, ...]
    bill: Bill
    workers: tuple[WorkerReport, ...]
    elapsed_s: float
    kept_bytes: int
    skipped_steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFunctionSpec(FunctionSpec):
    """The payload of a function that is, as its `attempt`, the `worker` of a parameter server.

    Its code is the whole model's. The function leaves before it is `lifetime_s` old, and fails when no work has come
    for twice `message_deadline_s`, which is how long its client waits for an answer.
    """

    FORMAT: ClassVar[str] = "funcpipe.server-function/1"

    worker: str
    size: str
    memory_mb: int
    lifetime_s: float | None = None

    def __post_init__(self) -> None:
        FunctionSpec.__post_init__(self)
        checks.filled("worker", self.worker)
        checks.at_least("memory_mb", self.memory_mb, 1)
        checks.all_positive(self, "lifetime_s")


WATCH_PREFIX = "_watch/"
"""The prefix of the keys of all marks of detached runs, see `runstate.functions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSpec:
    """The payload of a watchdog, a function that restarts the silent workers of detached runs.

    It watches the detached runs in the storage at the URL `storage`, or `run` alone, whose RunKey has the text
    `run_key`; without one, the platform at the URL `platform` unwraps what marks hold. It ends when no worker seems
    silent, or with `until_ended` when there is no such run any more.
    """

    FORMAT: ClassVar[str] = "funcpipe.watch/1"

    storage: str
    platform: str = ""
    run: str | None = None
    run_key: str = field(default="", repr=False)
    until_ended: bool = False

    def __post_init__(self) -> None:
        checks.filled("storage", self.storage)
