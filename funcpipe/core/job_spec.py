"""The specification of a whole training job: its goal, deadline, budget and risk."""

from dataclasses import dataclass
from typing import ClassVar

from funcpipe.core import checks
from funcpipe.errors import InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Train on `samples` samples for so many `epochs`, or until the loss is `target_loss`.

    Every synchronous way updates the model after `global_batch` samples. `deadline_s` and `budget_usd` hold for the
    whole job; None means that there is no such limit. `miss_chance` is how likely the deadline may be missed.
    """

    FORMAT: ClassVar[str] = "funcpipe.job-spec/1"

    samples: int
    global_batch: int
    epochs: float | None = None
    target_loss: float | None = None
    deadline_s: float | None = None
    budget_usd: float | None = None
    miss_chance: float = 0.05

    def __post_init__(self) -> None:
        checks.whole("samples", self.samples, 1)
        checks.whole("global_batch", self.global_batch, 1)
        if (self.epochs is None) == (self.target_loss is None):
            raise InvalidValue("epochs", self.epochs, "or target_loss must be given, and only one of them")
        for name in ("epochs", "deadline_s", "budget_usd"):
            if getattr(self, name) is not None:
                checks.positive(name, getattr(self, name))
        checks.at_least("miss_chance", self.miss_chance, 0)
        if self.miss_chance >= 1:
            raise InvalidValue("miss_chance", self.miss_chance, "must be below 1")

    @property
    def goal(self) -> str:
        """The goal of the job, in words."""
        if self.epochs is None:
            return f"loss {self.target_loss:g}"
        return "1 epoch" if self.epochs == 1 else f"{self.epochs:g} epochs"
