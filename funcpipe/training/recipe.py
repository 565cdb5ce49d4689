"""The recipe of a model's training, apart from its data and its plan: the same for the functions of every stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from funcpipe.core import Coupled, Interval, OnNan, Precision, Reduction, checks
from funcpipe.errors import InvalidValue, PlanError
from funcpipe.model.graph.program import autocast_to
from funcpipe.training.averaging import EMA, SWA
from funcpipe.training.norms import GradientNorm, LossScale
from funcpipe.training.teachers import Teacher, as_teachers
from funcpipe.training.weighted_loss import WeightedLoss

LossFunction = Callable[[Any, Any], Any]
"""The mean loss over a batch, of the model's output and the target; or, if that is declared, a sum and its weight."""

OptimizerFactory = Callable[..., Optimizer]
"""Makes the optimiser of the parameters that it is given; if its argument is called `named_parameters`, of pairs of
their full names and the parameters.
"""

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


@dataclass(frozen=True)
class CastLoss:
    """A loss function under autocast; unlike a closure, it can be sent to functions."""

    loss: LossFunction
    precision: Precision

    def __call__(self, output: Any, target: Any) -> Any:
        """Return the loss of `output` against `target`."""
        with autocast_to(self.precision):
            return self.loss(output, target)


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
    scheduler: SchedulerFactory | None
    scheduler_interval: Interval | str
    scheduler_monitor: str
    average: EMA | SWA | None
    teachers: Teacher | Sequence[Teacher]
    precision: Precision | str
    on_nan: OnNan | str
    coupled: Coupled | str
    reduction: Reduction | str


def recipe_with(loss: LossFunction, optimizer: OptimizerFactory, keywords: RecipeKeywords) -> Recipe:
    """Return the recipe of these; raises InvalidValue."""
    given: dict[str, Any] = dict(keywords)
    words = (
        *(("scheduler_interval", Interval), ("precision", Precision), ("on_nan", OnNan)),
        *(("coupled", Coupled), ("reduction", Reduction)),
    )
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


def no_optimizer(parameters: Any) -> Optimizer:
    """Return the optimiser of a model that is only evaluated. Raises PlanError when it is to train."""
    raise PlanError("the model has no optimizer; to train it, give FuncPipe one: optimizer=partial(torch.optim.SGD, …)")
