"""Tries a recipe out before a run: its optimiser, and all steps of its learning-rate schedule, saved in the middle."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from funcpipe.core import Coupled, Interval
from funcpipe.core.texts import error_text
from funcpipe.errors import InputError, InvalidValue, ModelError
from funcpipe.model.graph.isolation import in_turn
from funcpipe.training.adapters import loss_of_output
from funcpipe.training.data import Step
from funcpipe.training.lr_schedule import LrSchedule
from funcpipe.training.optimizer_trial import check_optimizer, made_optimizer
from funcpipe.training.optimizers import ParameterShape, trainable_shapes
from funcpipe.training.recipe import Recipe, no_optimizer
from funcpipe.training.state import SCHEDULER, StageState
from funcpipe.training.state_groups import restore_groups
from funcpipe.training.teacher_checks import followed

_MOST = 10_000
"""Steps of a schedule that are tried at most."""

_PARAMETERS = ("params", "param_names")


@in_turn()
def check_recipe(
    recipe: Recipe,
    shapes: Sequence[ParameterShape],
    *,
    steps: int = 0,
    epochs: int = 0,
    has_validation: bool | None = None,
    resumed: StageState | None = None,
) -> None:
    """Raise InputError unless the optimiser and the scheduler of `recipe` work for a model with these parameters.

    The schedule is tried for a run of so many more `steps`, which end so many `epochs`, that goes on from `resumed` if
    that is given. Without `has_validation`, a schedule that needs one is refused; None stands for not known yet.
    """
    check_optimizer(recipe.optimizer, shapes)
    _check_clipping(recipe, shapes)
    if recipe.scheduler is None or not shapes:
        return
    calls = steps if recipe.scheduler_interval is Interval.STEP else epochs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # functions will warn
        optimizer, schedule = _made(recipe, shapes)
        if schedule.needs_validation and has_validation is False:
            raise InputError(
                f"the {schedule.kind} is stepped with {recipe.scheduler_monitor!r} of each validation, and this run "
                "has none; train with validation=, or choose a scheduler that needs none"
            )
        if resumed is None:
            _check_continues(recipe, shapes, optimizer, schedule, calls)
            return
        _restore(resumed, optimizer, schedule)
        try:
            _check_continues(recipe, shapes, optimizer, schedule, calls)
        except InputError as error:
            raise InputError(f"{error}; the run goes on with the schedule that it has saved") from error


@in_turn()
def check_for_model(recipe: Recipe, model: nn.Module) -> None:
    """Raise InputError or ModelError unless `recipe` works for `model`; without an optimiser, it cannot be tried."""
    followed(recipe.teachers, model)
    if recipe.coupled is Coupled.CACHE and recipe.loss is loss_of_output:
        raise InvalidValue(
            "coupled",
            recipe.coupled.value,
            "needs a loss_fn (--loss): the model computes its loss in its forward, which runs one micro-batch at a "
            "time; let it return what the loss is computed from",
        )
    if recipe.optimizer is not no_optimizer:
        check_recipe(recipe, trainable_shapes(model, recipe.loss))


def _check_clipping(recipe: Recipe, shapes: Sequence[ParameterShape]) -> None:
    for shape in shapes if recipe.clip_grad_value is not None else ():
        if shape.dtype.is_complex:
            raise InputError(
                f"clip_grad_value has no meaning for complex numbers, which {shape.name} holds; train with "
                "clip_grad_norm, or keep its real and imaginary parts in a parameter (torch.view_as_complex)"
            )


def _made(recipe: Recipe, shapes: Sequence[ParameterShape]) -> tuple[Optimizer, LrSchedule]:
    optimizer = made_optimizer(recipe.optimizer, [(shape.name, shape.stand_in()) for shape in shapes])
    try:
        return optimizer, LrSchedule(recipe, optimizer)
    except InputError:
        raise
    except Exception as error:  # whatever a user's factory raises
        raise InputError(
            f"the scheduler cannot be made: {error_text(error)}; scheduler= is called with the optimiser"
        ) from error


def _restore(state: StageState, optimizer: Optimizer, schedule: LrSchedule) -> None:
    """Bring the groups and the schedule to where a run was."""
    saved = state.settings["optimizer"]
    numbers = {group.get("number"): group for group in saved["groups"]} if saved is not None else {}
    groups = [group for number, group in numbers.items() if number is not None]
    restore_groups(groups, optimizer, [() for _ in optimizer.param_groups], state.tensors)
    if SCHEDULER in state.settings:
        schedule.restore(state.settings[SCHEDULER], state.tensors)


def _check_continues(
    recipe: Recipe, shapes: Sequence[ParameterShape], optimizer: Optimizer, schedule: LrSchedule, calls: int
) -> None:
    """Step the schedule to its end; from the middle on beside another one, which begins with its saved state."""
    tried = min(calls, _MOST)
    groups = len(optimizer.param_groups)
    for call in range(tried // 2):
        _step(recipe, schedule, call, calls)
    tensors: dict[str, Tensor] = {}
    try:
        saved = schedule.capture(tensors)
    except ModelError as error:
        raise InputError(f"the scheduler cannot be saved: {error}") from error
    other_optimizer, other = _made(recipe, shapes)
    for group, continued in zip(optimizer.param_groups, other_optimizer.param_groups, strict=False):
        continued.update({name: _copied(value) for name, value in group.items() if name not in _PARAMETERS})
    other.restore(saved, tensors)
    for call in range(tried // 2, tried):
        _step(recipe, schedule, call, calls)
        _step(recipe, other, call, calls)
        if len(optimizer.param_groups) != groups:
            raise InputError(f"the {schedule.kind} adds parameter groups to the optimiser; make them in its factory")
        pairs = zip(optimizer.param_groups, other_optimizer.param_groups, strict=True)
        if any(_settings(one) != _settings(two) for one, two in pairs):
            raise InputError(
                f"the {schedule.kind} does not continue from its state_dict() as if it had not been interrupted "
                f"(its step {call + 1} of {calls} gives another learning rate); let what it needs be in its "
                "state_dict(), or depend on nothing but its last_epoch"
            )


def _step(recipe: Recipe, schedule: LrSchedule, call: int, calls: int) -> None:
    try:
        if schedule.needs_validation:
            schedule.after_validation({recipe.scheduler_monitor: 1.0})
        else:
            schedule.after_step(Step(number=call, epoch=call, micro_batches=(), ends_epoch=True))
    except Exception as error:  # whatever a user's scheduler raises
        often = "after each training step" if recipe.scheduler_interval is Interval.STEP else "at the end of each epoch"
        raise InputError(
            f"the {schedule.kind} fails at its step {call + 1} of the {calls} that this run takes: "
            f"{error_text(error)}; it is stepped {often} (scheduler_interval="
            f"{recipe.scheduler_interval.value!r}), make it for that many"
        ) from error


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings, tensors as their numbers."""
    kept = {name: value for name, value in group.items() if name not in _PARAMETERS}
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in kept.items()}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
