"""The schedule and data of validations, and their decisions: the best step, and whether the run ends early."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from funcpipe.core import checks
from funcpipe.errors import InvalidValue

LOSS = "val_loss"
"""The name of the mean loss among the values of a validation."""


def is_due(step: int, *, every: int, began_step: int) -> bool:
    """Return True if a run that began after `began_step` steps is validated after `step` of them, before the next one.

    It is, `every` so many steps; what trains nothing, which has no such number, is evaluated at once.
    """
    return step % every == 0 and step > began_step if every else step == 0


class MonitorMode(Enum):
    """The direction in which the monitored value gets better."""

    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """The value that decides which validation is best, and after how many worse ones the run ends.

    A validation is better than the best one if its value differs by more than `min_delta`. After `patience`
    validations in a row that are not, the run ends; None is never. The models of the `keep_best` best ones are kept.
    """

    name: str = LOSS
    mode: MonitorMode = MonitorMode.MIN
    patience: int | None = None
    min_delta: float = 0.0
    keep_best: int = 1

    def __post_init__(self) -> None:
        checks.at_least("min_delta", self.min_delta, 0)
        checks.all_at_least(self, 1, "patience")
        checks.whole("keep_best", self.keep_best, 0)

    def is_better(self, value: float, best: float | None) -> bool:
        """Return True if `value` beats `best`; NaN beats nothing, and is beaten by any number."""
        if math.isnan(value):
            return False
        if best is None or math.isnan(best):
            return True
        return (best - value if self.mode is MonitorMode.MIN else value - best) > self.min_delta

    def ranked(self, values: Mapping[int, float], best_step: int | None) -> list[int]:
        """Return the steps of `values` whose models are kept: the best one first, then the others by their values."""
        sign = 1 if self.mode is MonitorMode.MIN else -1
        numbers = {step: value for step, value in values.items() if not math.isnan(value)}
        return sorted(numbers, key=lambda step: (step != best_step, sign * numbers[step], step))[: self.keep_best]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """The result of a validation after `step` steps: the mean loss as `val_loss`, and each metric by its name.

    `best_step` is the step of the best validation so far, with the monitored value `best_value`, None while there has
    been no number; `waited` validations since were no better. With `stop` the run ends here. `best_steps` are those
    whose models are kept, the best one first, and `best_values` the monitored values there.
    """

    FORMAT: ClassVar[str] = "funcpipe.validation/1"

    step: int
    samples: int
    values: Mapping[str, float]
    best_step: int | None = None
    best_value: float | None = None
    waited: int = 0
    stop: bool = False
    best_steps: tuple[int, ...] = ()
    best_values: tuple[float, ...] = ()

    def ends(self, first_step: int) -> bool:
        """Return True if functions that began after `first_step` steps end here: not where an earlier run has ended."""
        return self.stop and self.step > first_step


def next_report(
    monitor: Monitor, before: ValidationReport | None, *, step: int, samples: int, values: Mapping[str, float]
) -> ValidationReport:
    """Return the report of a validation that follows the one `before`: a function of these alone, so that all agree."""
    value = values.get(monitor.name, math.nan)  # which a model that only predicts lacks
    before = before or ValidationReport(step=0, samples=0, values={})
    best_step, best_value, waited = before.best_step, before.best_value, 1 + before.waited * (not before.stop)
    if monitor.is_better(value, best_value):
        best_step, best_value, waited = step, value, 0
    known = dict(zip(before.best_steps, before.best_values, strict=True)) | {step: value}
    kept = monitor.ranked(known, best_step)
    return ValidationReport(
        step=step,
        samples=samples,
        values=values,
        best_step=best_step,
        best_value=best_value,
        waited=waited,  # a run that ended early and goes on waits anew
        stop=monitor.patience is not None and waited >= monitor.patience,
        best_steps=tuple(kept),
        best_values=tuple(known[each] for each in kept),
    )


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Validate a run meanwhile, by default after every epoch.

    Args:
        data: Data as `train` takes it.
        every_steps: Validate after every so many steps.
        every_epochs: Or after every so many epochs.
        metrics: Metrics by name: those of torchmetrics or evaluate, factories of them, or functions of the output and
            the target that return the mean over the samples they are given. Metrics of libraries get the `labels` of
            a dictionary and the `logits` of an output; those of evaluate get classes, without targets of -100.
        monitor: `val_loss` or the name of the metric by which validations are compared.
        mode: Less is better ("min"), or more ("max").
        patience: After so many validations without a better one the run ends.
        min_delta: A validation is better if it is better by so much.
        keep_best: Keep the models of so many validations, the best ones; 0 or False keeps none.
    """

    data: Any
    every_steps: int | None = None
    every_epochs: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict, hash=False)
    monitor: str = LOSS
    mode: MonitorMode | str = MonitorMode.MIN
    patience: int | None = None
    min_delta: float = 0.0
    keep_best: int = 1

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_epochs is not None:
            every = (self.every_steps, self.every_epochs)
            raise InvalidValue("every_steps, every_epochs", every, "must not both be given")
        checks.all_at_least(self, 1, "every_steps", "every_epochs")
        if LOSS in self.metrics:
            raise InvalidValue("metrics", LOSS, "is the name of the loss; call the metric something else")
        known = (LOSS, *self.metrics)
        if self.monitor not in known:
            raise InvalidValue("monitor", self.monitor, f"must be one of {', '.join(known)}")
        if self.mode not in ("min", "max") and not isinstance(self.mode, MonitorMode):
            raise InvalidValue("mode", self.mode, "must be min or max")
        _ = self.watched

    @property
    def watched(self) -> Monitor:
        """The monitor that decides which validation is the best, and when to end."""
        return Monitor(
            name=self.monitor,
            mode=MonitorMode(self.mode),
            patience=self.patience,
            min_delta=self.min_delta,
            keep_best=int(self.keep_best),
        )

    def interval(self, steps_per_epoch: int) -> int:
        """Return the number of steps between two validations."""
        return self.every_steps or (self.every_epochs or 1) * steps_per_epoch
