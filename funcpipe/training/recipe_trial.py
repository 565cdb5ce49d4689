"""Tries a recipe out before a run: what cannot work is refused here, with the way out.

The optimiser's factory is called once with parameters of the model's shapes that take no memory. Then a small optimiser
takes some steps; its state is saved and put into another one, as when a function is replaced; both go on, and must
agree to the last bit. So an optimiser that keeps something outside its state, a hidden schedule for example, is found
out. A learning-rate schedule takes all steps of the run, and is saved in the middle.
"""

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from funcpipe.core import Coupled, Interval, OptimizerKind
from funcpipe.core.texts import error_text
from funcpipe.errors import InputError, InvalidValue, ModelError
from funcpipe.model.draws import reseed
from funcpipe.model.graph.isolation import in_turn
from funcpipe.model.tensors import one_thread
from funcpipe.training.averaging import followed
from funcpipe.training.batches import Step
from funcpipe.training.losses import loss_of_output
from funcpipe.training.optimizers import (
    OptimizerFactory,
    ParameterShape,
    _is_small,
    are_equal,
    capture_optimizer,
    kind_of,
    made_optimizer,
    restore_groups,
    restore_optimizer,
    small_parameters,
    trainable_shapes,
)
from funcpipe.training.recipe import LrSchedule, Recipe, no_optimizer
from funcpipe.training.state import SCHEDULER, StageState

_MOST_STEPS = 10_000
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
    _check_optimizer(recipe.optimizer, shapes)
    _check_clipping(recipe, shapes)
    if recipe.scheduler is None or not shapes:
        return
    calls = steps if recipe.scheduler_interval is Interval.STEP else epochs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # functions will warn
        optimizer, schedule = _made_schedule(recipe, shapes)
        if schedule.needs_validation and has_validation is False:
            raise InputError(
                f"the {schedule.kind} is stepped with {recipe.scheduler_monitor!r} of each validation, and this run "
                "has none; train with validation=, or choose a scheduler that needs none"
            )
        if resumed is None:
            _check_schedule(recipe, shapes, optimizer, schedule, calls)
            return
        _restore(resumed, optimizer, schedule)
        try:
            _check_schedule(recipe, shapes, optimizer, schedule, calls)
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


def _made_schedule(recipe: Recipe, shapes: Sequence[ParameterShape]) -> tuple[Optimizer, LrSchedule]:
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


def _check_schedule(
    recipe: Recipe, shapes: Sequence[ParameterShape], optimizer: Optimizer, schedule: LrSchedule, calls: int
) -> None:
    """Step the schedule to its end; from the middle on beside another one, which begins with its saved state."""
    tried = min(calls, _MOST_STEPS)
    groups = len(optimizer.param_groups)
    for call in range(tried // 2):
        _step_schedule(recipe, schedule, call, calls)
    tensors: dict[str, Tensor] = {}
    try:
        saved = schedule.capture(tensors)
    except ModelError as error:
        raise InputError(f"the scheduler cannot be saved: {error}") from error
    other_optimizer, other = _made_schedule(recipe, shapes)
    for group, continued in zip(optimizer.param_groups, other_optimizer.param_groups, strict=False):
        continued.update({name: _copied(value) for name, value in group.items() if name not in _PARAMETERS})
    other.restore(saved, tensors)
    for call in range(tried // 2, tried):
        _step_schedule(recipe, schedule, call, calls)
        _step_schedule(recipe, other, call, calls)
        if len(optimizer.param_groups) != groups:
            raise InputError(f"the {schedule.kind} adds parameter groups to the optimiser; make them in its factory")
        pairs = zip(optimizer.param_groups, other_optimizer.param_groups, strict=True)
        if any(_settings(one) != _settings(two) for one, two in pairs):
            raise InputError(
                f"the {schedule.kind} does not continue from its state_dict() as if it had not been interrupted "
                f"(its step {call + 1} of {calls} gives another learning rate); let what it needs be in its "
                "state_dict(), or depend on nothing but its last_epoch"
            )


def _step_schedule(recipe: Recipe, schedule: LrSchedule, call: int, calls: int) -> None:
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


_STEPS = 4  # before and after the state is saved

_AS_SCHEDULER = "give the schedule as scheduler=, so that it is saved and continued wherever the optimiser is"


def _take_steps(optimizer: Optimizer, named: Sequence[tuple[str, nn.Parameter]], *, steps: int, seed: int = 0) -> None:
    """Take `steps` steps with drawn gradients. Raises InputError if the optimiser fails in one."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for _, parameter in named:
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=draw)
        try:
            optimizer.step()
        except Exception as error:  # whatever a user's optimiser raises
            raise InputError(
                f"the optimiser, {kind_of(optimizer)}, cannot take a step: {error_text(error)}; "
                "choose one whose step() needs nothing but gradients"
            ) from error


def _check_optimizer(factory: OptimizerFactory, shapes: Sequence[ParameterShape]) -> None:
    """Raise InputError unless `factory` makes an optimiser for a model with these trainable parameters that can be
    saved and continued.
    """
    if not shapes:
        return
    with one_thread(), torch.random.fork_rng(devices=[]):  # of so few numbers, others would wait longer than compute
        optimizer = made_optimizer(factory, [(shape.name, shape.stand_in()) for shape in shapes])
        _check_rates(optimizer)
        _check_nothing_hidden(optimizer)
        _check_no_closure(optimizer)
        _check_continues(factory, shapes)


def _check_rates(optimizer: Optimizer) -> None:
    for number, group in enumerate(optimizer.param_groups):
        rate = group.get("lr")
        if rate is None:  # an optimiser that finds its own
            continue
        if not isinstance(rate, float | int | Tensor) or not math.isfinite(rate) or rate < 0:
            raise InputError(
                f"the learning rate of the optimiser's group {number} is {rate!r}; it must be a number of at least 0"
            )


def _check_nothing_hidden(optimizer: Optimizer) -> None:
    """Refuse schedules and hooks that live beside the optimiser, where no checkpoint holds them."""
    if any("initial_lr" in group for group in optimizer.param_groups) or _is_wrapped(optimizer):
        raise InputError(
            f"the optimiser factory also makes a learning-rate scheduler, which would begin anew in each function; "
            f"{_AS_SCHEDULER}"
        )
    if "step" in vars(optimizer):
        raise InputError(
            f"the optimiser factory replaces the step() of its {kind_of(optimizer)}, and what that keeps would be lost "
            f"with each function; override step() in a subclass of the optimiser, or {_AS_SCHEDULER}"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise InputError(
            f"the optimiser factory registers hooks on its {kind_of(optimizer)}, and what they keep would be lost with "
            f"each function; override step() in a subclass of the optimiser, or {_AS_SCHEDULER}"
        )


def _is_wrapped(optimizer: Optimizer) -> bool:
    """Return True if a scheduler has been made on the optimiser, which then watches its step()."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def _check_no_closure(optimizer: Optimizer) -> None:
    parameters = inspect.signature(optimizer.step).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in kinds]
    if isinstance(optimizer, LBFGS) or needed:
        raise InputError(
            f"the optimiser, {kind_of(optimizer)}, needs a {needed[0] if needed else 'closure'} in its step(), to "
            "compute the loss again; a step over functions has one forward and backward: choose one such as AdamW"
        )


def _check_continues(factory: OptimizerFactory, shapes: Sequence[ParameterShape]) -> None:
    """Raise InputError if an optimiser that is restored from its state goes on otherwise than one that was not."""
    named, others = small_parameters(shapes), small_parameters(shapes)
    optimizer, restored = made_optimizer(factory, named), made_optimizer(factory, others)
    tensors: dict[str, Tensor] = {}
    try:
        reseed(0)
        _take_steps(optimizer, named, steps=_STEPS)
        saved = capture_optimizer(optimizer, {id(p): name for name, p in named}, tensors)
        with torch.no_grad():
            for (_, parameter), (_, other) in zip(named, others, strict=True):
                other.copy_(parameter)
        restore_optimizer(saved, restored, {id(p): name for name, p in others}, tensors)
        for one, parameters in ((optimizer, named), (restored, others)):
            reseed(1)
            _take_steps(one, parameters, steps=_STEPS, seed=1)
    except InputError as error:
        if isinstance(error.__cause__, Exception) and not _is_small(shapes):
            return  # it may be the small shapes that it cannot work with
        raise
    changed = [name for (name, p), (_, other) in zip(named, others, strict=True) if not are_equal(p, other)]
    if changed:
        raise InputError(
            f"the optimiser, {kind_of(optimizer)}, does not continue from its saved state as if it had not been "
            f"interrupted ({changed[0]} differs): what it keeps outside `state` and `param_groups` is lost whenever a "
            f"function is replaced; keep it there, or, if it changes the learning rate, {_AS_SCHEDULER}"
        )


@in_turn()
def optimizer_kind(factory: OptimizerFactory, shapes: Sequence[ParameterShape] = ()) -> OptimizerKind:
    """Return the kind of optimiser by how many values it keeps per parameter, found by taking one step with it.

    `shapes` are the parameters of the model; the step is taken with small ones of these names. Raises InputError if
    the optimiser cannot take it.
    """
    named = small_parameters(shapes) or [("weight", nn.Parameter(torch.zeros(2, 3)))]
    optimizer = made_optimizer(factory, named)
    _take_steps(optimizer, named, steps=1)
    count = max(_values_of(optimizer, parameter) for _, parameter in named)
    return min(OptimizerKind, key=lambda kind: (kind.values_per_parameter < count, kind.values_per_parameter))


def _values_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    """Return the number of values that the optimiser keeps for each element of `parameter`."""
    kept = optimizer.state.get(parameter, {}).values()
    return sum(isinstance(value, Tensor) and value.shape == parameter.shape for value in kept)
