"""The recipe of a model's training, apart from its data and its plan: the same for the functions of every stage.

Its learning-rate schedule is torch's scheduler on one optimiser, stepped where plain training steps it. Every stage
makes the same scheduler on its own optimiser, and steps it at the same training steps, so all stages have the same
learning rate. A step that is skipped because gradients overflowed counts too, as in torch's usual loop.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from funcpipe.core import Coupled, Interval, OnNan, Precision, Reduction, checks
from funcpipe.errors import DataError, InputError, InvalidValue, PlanError
from funcpipe.training.averaging import EMA, SWA, Teacher, as_teachers
from funcpipe.training.batches import Step
from funcpipe.training.losses import CastLoss, LossFunction, WeightedLoss
from funcpipe.training.norms import GradientNorm, LossScale
from funcpipe.training.optimizers import OptimizerFactory, join_tensors, split_tensors

SchedulerFactory = Callable[[Optimizer], LRScheduler]
"""Makes the learning-rate scheduler of the optimiser that it is given."""

VALIDATION_LOSS = "val_loss"

_LOSSES_OVER = {
    Coupled.ACCUMULATE: "micro-batches, as in gradient accumulation",
    Coupled.CACHE: "whole global batches, as in gradient caching",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model's loss and optimiser, and what else decides how it learns.

    Its gradient is clipped to the norm `clip_grad_norm`, or each element of it to `clip_grad_value`, if that is given.
    What `scheduler` makes is stepped once in each `scheduler_interval`, or, if it is a ReduceLROnPlateau, after each
    validation, with its `scheduler_monitor`. `average` is the average of the parameters that is kept; `teachers` are
    parts of the model that average other parts. The model and the loss compute in `precision`; `on_nan` is what follows
    where a step's numbers are not finite, `coupled` where the loss of a batch is not the mean of its micro-batches'
    losses. `reduction` is what the loss returns.
    """

    loss: LossFunction
    optimizer: OptimizerFactory
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    scheduler: SchedulerFactory | None = None
    scheduler_interval: Interval = Interval.EPOCH
    scheduler_monitor: str = VALIDATION_LOSS
    average: EMA | SWA | None = None
    teachers: tuple[Teacher, ...] = ()
    precision: Precision = Precision.FP32
    on_nan: OnNan = OnNan.STOP
    coupled: Coupled = Coupled.REFUSE
    reduction: Reduction = Reduction.MEAN

    def __post_init__(self) -> None:
        if self.clip_grad_norm is not None:
            checks.positive("clip_grad_norm", self.clip_grad_norm)
        if self.clip_grad_value is not None:
            checks.positive("clip_grad_value", self.clip_grad_value)
            if self.clip_grad_norm is not None:
                raise InvalidValue("clip_grad_value", self.clip_grad_value, "must not be given beside clip_grad_norm")
        if self.coupled is Coupled.CACHE and self.is_weighted:
            rule = f"must not be cache beside reduction={self.reduction.value!r}: return the mean over the whole batch"
            raise InvalidValue("coupled", self.coupled.value, rule)
        _check_factory("optimizer", self.optimizer, Optimizer, "parameters: AdamW(parameters, lr=1e-3)")
        if self.scheduler is not None:
            _check_factory("scheduler", self.scheduler, LRScheduler, "optimizer: StepLR(optimizer, step_size=10)")
        if self.average is not None and not isinstance(self.average, EMA | SWA):
            raise InvalidValue("average", self.average, "must be an EMA or SWA of funcpipe, such as EMA(decay=0.999)")

    @property
    def lr_schedule(self) -> str | None:
        """The schedule in a word that a run's record holds, None without one."""
        return None if self.scheduler is None else f"by {self.scheduler_interval.value}"

    @property
    def averaged_by(self) -> str | None:
        """The average in words that a run's record holds, None without one."""
        return None if self.average is None else repr(self.average)

    @property
    def taught_by(self) -> str | None:
        """The teachers in words that a run's record holds, None without any."""
        return ", ".join(map(str, self.teachers)) or None

    @property
    def loss_over(self) -> str | None:
        """The units that losses are means over, in words that a run's record holds; None for samples."""
        if self.is_weighted:
            weighs = self.reduction is Reduction.WEIGHTED
            return "the weights that the loss returns" if weighs else "targets that are not ignored"
        return _LOSSES_OVER.get(self.coupled)

    @property
    def is_weighted(self) -> bool:
        """True if the loss of a step is a sum over all its micro-batches, divided by the sum of their weights."""
        return self.reduction is not Reduction.MEAN

    @property
    def exchanges_norms(self) -> bool:
        """True if a step depends on the norm of all stages' gradients, whatever the plan."""
        clips = self.clip_grad_norm is not None
        return clips or self.precision.scales_loss or self.on_nan is OnNan.SKIP or self.is_weighted

    def gradient_norm(self, *, small_range: bool = False) -> GradientNorm:
        """Return the collector of one worker's gradient norms; with a loss scale in fp16, and where gradients travel in
        16-bit floats of `small_range`.
        """
        scales = small_range or self.precision.scales_loss
        return GradientNorm(
            clip_grad_norm=self.clip_grad_norm,
            loss_scale=LossScale() if scales else None,
            on_nan=self.on_nan,
            weighted=self.is_weighted,
        )

    @property
    def cast_loss(self) -> LossFunction:
        """The loss as it is computed: under autocast to `precision`; a weighted one as a sum and its weight."""
        if self.is_weighted:
            return WeightedLoss(self.loss, self.reduction, self.precision)
        return self.loss if self.precision is Precision.FP32 else CastLoss(self.loss, self.precision)


def check_precision(what: str, precision: Precision, recipe: Recipe) -> None:
    """Raise PlanError if `what`, a plan or a profile, is for another precision: its times and memory are not right."""
    if precision is not recipe.precision:
        raise PlanError(
            f"the {what} is for {precision.value}, but the model trains in {recipe.precision.value}, which takes other "
            f"times and other memory; train with precision={precision.value!r}, or profile with "
            f"--precision {recipe.precision.value} and plan again"
        )


class RecipeKeywords(TypedDict, total=False):
    """The fields of `Recipe` that have defaults, as `FuncPipe` takes them by keyword; choices as words too."""

    clip_grad_norm: float | None
    clip_grad_value: float | None
    scheduler: SchedulerFactory | LRScheduler | None
    scheduler_interval: Interval | str
    scheduler_monitor: str
    average: EMA | SWA | None
    teachers: Teacher | Sequence[Teacher]
    precision: Precision | str | int
    on_nan: OnNan | str
    coupled: Coupled | str
    reduction: Reduction | str


def recipe_with(loss: LossFunction, optimizer: OptimizerFactory, keywords: RecipeKeywords) -> Recipe:
    """Return the recipe of these; raises InvalidValue."""
    given: dict[str, Any] = dict(keywords)
    words = (
        *(("scheduler_interval", Interval), ("on_nan", OnNan)),
        *(("coupled", Coupled), ("reduction", Reduction)),
    )
    if "precision" in given:
        given["precision"] = Precision.named(given["precision"])
    given |= {field: checks.choice(field, given[field], kind) for field, kind in words if field in given}
    given["teachers"] = as_teachers(given.get("teachers", ()))
    return Recipe(loss=loss, optimizer=optimizer, **given)


def _check_factory(field: str, value: object, made: type, example: str) -> None:
    """Raise InvalidValue if `value` is what a factory makes, or cannot be called."""
    rule = f"must be a function that makes one in each stage, such as `lambda {example}`"
    if isinstance(value, made):
        raise InvalidValue(field, type(value), f"{rule}, not one that is made already")
    if not callable(value):
        raise InvalidValue(field, value, rule)


def check_alone(recipe: Recipe) -> None:
    """Raise PlanError for what has no meaning where replicas train alone, or is decided by all of them together."""
    refused = {
        "coupled=cache: its loss is that of a whole global batch": recipe.coupled is Coupled.CACHE,
        "teachers: they average the parameters after every step": bool(recipe.teachers),
        "average: it averages the parameters after every step": recipe.average is not None,
        "a loss with weights: it is divided by those of a whole global batch": recipe.is_weighted,
        "on_nan=skip: all replicas leave out a step": recipe.on_nan is OnNan.SKIP,
        "precision=fp16: all replicas share the scale of losses": recipe.precision.scales_loss,
    }
    for reason, is_so in refused.items():
        if is_so:
            raise PlanError(f"replicas that meet every few steps do not allow {reason}; train with sync_every=1")


def no_optimizer(parameters: Any) -> Optimizer:
    """Return the optimiser of a model that is only evaluated. Raises PlanError when it is to train."""
    raise PlanError("the model has no optimizer; to train it, give FuncPipe one: optimizer=partial(torch.optim.SGD, …)")


PREFIX = "scheduler"
"""The prefix of the names of the tensors that a scheduler keeps."""


class LrSchedule:
    """The scheduler that `recipe` has, on `optimizer`."""

    def __init__(self, recipe: Recipe, optimizer: Optimizer) -> None:
        """Raises InputError unless the recipe's factory makes a scheduler of this optimiser."""
        assert recipe.scheduler is not None, "without a scheduler there is no schedule"
        made = recipe.scheduler(optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch warns when the first step is skipped
        if not isinstance(made, LRScheduler):
            raise InputError(
                f"the scheduler factory returns a {type(made).__name__}; it must return a scheduler of "
                "torch.optim.lr_scheduler, or a subclass of its LRScheduler; join several in a SequentialLR or a "
                "ChainedScheduler"
            )
        if made.optimizer is not optimizer:
            raise InputError(
                f"the {type(made).__name__} that the scheduler factory returns is of another optimiser than the one "
                "that the factory is given; make it of the factory's argument: scheduler=lambda optimizer: …"
            )
        self._scheduler = made
        self._interval, self._monitor = recipe.scheduler_interval, recipe.scheduler_monitor

    @property
    def kind(self) -> str:
        """The scheduler's class."""
        return type(self._scheduler).__name__

    @property
    def needs_validation(self) -> bool:
        """True if it is stepped with a value of a validation."""
        return isinstance(self._scheduler, ReduceLROnPlateau)

    def after_step(self, step: Step) -> None:
        """Step the scheduler if it is due after `step`."""
        if not self.needs_validation and (self._interval is Interval.STEP or step.ends_epoch):
            self._scheduler.step()

    def after_validation(self, values: Mapping[str, float]) -> None:
        """Step a ReduceLROnPlateau with the value that it monitors. Raises DataError if `values` lacks that."""
        if not isinstance(self._scheduler, ReduceLROnPlateau):
            return
        if self._monitor not in values:
            raise DataError(
                f"the {self.kind} monitors {self._monitor!r}, which the validation does not have; "
                f"let scheduler_monitor be one of {', '.join(sorted(values)) or 'its metrics'}"
            )
        self._scheduler.step(values[self._monitor])

    def capture(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The scheduler's state as JSON; its tensors go into `tensors`. Raises ModelError if it is not plain data."""
        return {"kind": self.kind, "state": split_tensors(self._scheduler.state_dict(), PREFIX, tensors)}

    def restore(self, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go back to what `capture` returned. Raises PlanError if that was another kind of scheduler."""
        if saved["kind"] != self.kind:
            raise PlanError(
                f"the run was started with a {saved['kind']} as its scheduler, not a {self.kind}; "
                "resume it with what it was started with"
            )
        self._scheduler.load_state_dict(join_tensors(saved["state"], tensors))
