"""A job (JobSpec), the machines or functions for it, the prediction for them, and a table of the ways."""

from dataclasses import dataclass, field
from typing import ClassVar

from funcpipe.core import checks
from funcpipe.core.json_form import IF_CHANGED
from funcpipe.core.plan import Plan
from funcpipe.core.texts import Described
from funcpipe.errors import InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Train on `samples` samples for so many `epochs`, or until the loss is `target_loss`.

    Every synchronous way updates the model after `global_batch` samples. `deadline_s` and `budget_usd` hold for the
    whole job; None means that there is no such limit. `miss_chance` is how likely the deadline may be missed, and
    `time_value` what an hour saved is worth in dollars.
    """

    FORMAT: ClassVar[str] = "funcpipe.job-spec/1"

    samples: int
    global_batch: int
    epochs: float | None = None
    target_loss: float | None = None
    deadline_s: float | None = None
    budget_usd: float | None = None
    miss_chance: float = 0.05
    time_value: float = field(default=0.0, metadata=IF_CHANGED)

    def __post_init__(self) -> None:
        checks.all_whole(self, 1, "samples", "global_batch")
        if (self.epochs is None) == (self.target_loss is None):
            raise InvalidValue("epochs", self.epochs, "or target_loss must be given, and only one of them")
        checks.all_positive(self, "epochs", "deadline_s", "budget_usd")
        checks.all_at_least(self, 0, "miss_chance", "time_value")
        if self.miss_chance >= 1:
            raise InvalidValue("miss_chance", self.miss_chance, "must be below 1")

    def worth_usd(self, seconds: float, usd: float) -> float:
        """Dollars, and what the time is worth."""
        return usd + self.time_value * seconds / 3600

    @property
    def goal(self) -> str:
        """The goal of the job, in words."""
        if self.epochs is None:
            return f"loss {self.target_loss:g}"
        return "1 epoch" if self.epochs == 1 else f"{self.epochs:g} epochs"


SERVER_ROLE = "parameter server"
"""The role of what is rented for a parameter server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """A number of functions or machines of one type, for the same work."""

    name: str
    count: int
    role: str = "worker"
    spot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CostItem:
    """A part of the bill."""

    name: str
    usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The prediction at `time_s`: the share of the work that is done, the dollars spent, the loss if modelled."""

    time_s: float
    done: float
    usd: float
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Provision(Described):
    """The functions or machines that one way of training the job rents, and the prediction for it.

    `start_s` is the part of `seconds` before the first iteration. `spread` is the standard deviation of the time as a
    share of it; `miss_chance` is None where there is no deadline. `losses_s` machines a second are lost, each of which
    adds `delay_s`. `binds` names the limit that decided, `why` says how the choice was made. `plan` is what FuncPipe
    would train by.
    """

    FORMAT: ClassVar[str] = "funcpipe.provision/1"

    way: str
    rented: tuple[Rented, ...]
    seconds: float
    iterations: float
    cost: tuple[CostItem, ...]
    binds: str
    why: str
    start_s: float = 0.0
    spread: float = 0.0
    miss_chance: float | None = None
    losses_s: float = 0.0
    delay_s: float = 0.0
    curve: tuple[CurvePoint, ...] = ()
    assumptions: tuple[str, ...] = ()
    plan: Plan | None = None

    @property
    def usd(self) -> float:
        """All dollars."""
        return sum(item.usd for item in self.cost)

    @property
    def text(self) -> str:
        """The rented functions or machines, in words."""
        return " + ".join(
            f"{item.count} x {item.name}"
            + (" spot" if item.spot else "")
            + ("" if item.role == "worker" else f" ({item.role})")
            for item in self.rented
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A way that cannot do the job, and why not."""

    way: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProvisionTable(Described):
    """Every way to do `job`, the cheapest first; `recommended` names one of them, or is None if none does the job.

    `assumptions` are those of the comparison, `market_assumptions` those of the market's values, by field.
    """

    FORMAT: ClassVar[str] = "funcpipe.provision-table/1"

    job: JobSpec
    model: str
    platform: str
    market: str
    provisions: tuple[Provision, ...]
    refusals: tuple[Refusal, ...]
    recommended: str | None
    why: str
    assumptions: tuple[str, ...] = ()
    market_assumptions: tuple[str, ...] = ()
