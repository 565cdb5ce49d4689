"""Tries an optimiser and a scheduler out before a run: what cannot work is refused here, with the way out.

The factory is called once with parameters of the model's shapes that take no memory. Then a small optimiser takes some
steps; its state is saved and put into another one, as when a function is replaced; both go on, and must agree to the
last bit. So an optimiser that keeps something outside its state, a hidden schedule for example, is found out.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from funcpipe.core.texts import error_text
from funcpipe.errors import FuncPipeError, InputError
from funcpipe.model.tensors import one_thread
from funcpipe.training.optimizers import ParameterShape, call_factory, takes_names
from funcpipe.training.recipe import OptimizerFactory
from funcpipe.training.state_groups import capture_optimizer, restore_optimizer

_STEPS = 4  # before and after the state is saved
_ELEMENTS = 100_000  # of a model that is tried as it is; of a larger one the dimensions are cut
_SMALL = 8  # the size of a dimension that is cut

_AS_SCHEDULER = "give the schedule as scheduler=, so that it is saved and continued wherever the optimiser is"


def small_parameters(shapes: Sequence[ParameterShape]) -> list[tuple[str, nn.Parameter]]:
    """Parameters of these names, with a few elements each in a large model."""
    return [(one.name, nn.Parameter(torch.zeros(one.shape, dtype=one.dtype))) for one in small_shapes(shapes)]


def small_shapes(shapes: Sequence[ParameterShape]) -> tuple[ParameterShape, ...]:
    """Return the same parameters, in a large model with a few elements each."""
    if _is_small(shapes):
        return tuple(shapes)
    return tuple(replace(shape, shape=tuple(min(size, _SMALL) for size in shape.shape)) for shape in shapes)


def _is_small(shapes: Sequence[ParameterShape]) -> bool:
    return sum(math.prod(shape.shape) for shape in shapes) <= _ELEMENTS


def take_steps(optimizer: Optimizer, named: Sequence[tuple[str, nn.Parameter]], *, steps: int, seed: int = 0) -> None:
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


def check_optimizer(factory: OptimizerFactory, shapes: Sequence[ParameterShape]) -> None:
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


def made_optimizer(factory: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return `factory`'s optimiser of these parameters. Raises InputError if it is not an optimiser of them."""
    given = "pairs of name and parameter" if takes_names(factory) else "parameters"
    try:
        made: Any = call_factory(factory, named)
    except FuncPipeError:  # there is no factory
        raise
    except Exception as error:  # whatever a user's factory raises
        raise InputError(
            f"the optimiser cannot be made: {error_text(error)}; optimizer= is called with a list of the "
            f"model's {len(named)} trainable {given}"
        ) from error
    if isinstance(made, list | tuple) and sum(isinstance(one, Optimizer) for one in made) > 1:
        raise InputError(
            f"the optimiser factory returns {len(made)} optimisers, and a step over functions is that of one; if they "
            "step together, make them groups of one optimiser; if in turn, train their parts in turn: see Several "
            "optimisers in docs/training.md"
        )
    if not isinstance(made, Optimizer):
        raise InputError(
            f"the optimiser factory returns a {type(made).__name__}; it must return a torch.optim.Optimizer of the "
            "parameters that it is given"
        )
    known = {id(parameter) for _, parameter in named}
    strange = [p for group in made.param_groups for p in group["params"] if id(p) not in known]
    if strange:
        raise InputError(
            f"the optimiser, {kind_of(made)}, holds {len(strange)} parameters that its factory was not given, the "
            f"first of shape {list(strange[0].shape)}: functions train their own copies, so let the factory use its "
            "argument, such as optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
        )
    if not any(group["params"] for group in made.param_groups):
        raise InputError(f"the optimiser, {kind_of(made)}, holds none of the model's {len(named)} trainable parameters")
    return made


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
        torch.manual_seed(0)
        take_steps(optimizer, named, steps=_STEPS)
        saved = capture_optimizer(optimizer, {id(p): name for name, p in named}, tensors)
        with torch.no_grad():
            for (_, parameter), (_, other) in zip(named, others, strict=True):
                other.copy_(parameter)
        restore_optimizer(saved, restored, {id(p): name for name, p in others}, tensors)
        for one, parameters in ((optimizer, named), (restored, others)):
            torch.manual_seed(1)
            take_steps(one, parameters, steps=_STEPS, seed=1)
    except InputError as error:
        if isinstance(error.__cause__, Exception) and not _is_small(shapes):
            return  # it may be the small shapes that it cannot work with
        raise
    pairs = zip(named, others, strict=True)
    changed = [name for (name, p), (_, other) in pairs if not are_equal(p, other)]
    if changed:
        raise InputError(
            f"the optimiser, {kind_of(optimizer)}, does not continue from its saved state as if it had not been "
            f"interrupted ({changed[0]} differs): what it keeps outside `state` and `param_groups` is lost whenever a "
            f"function is replaced; keep it there, or, if it changes the learning rate, {_AS_SCHEDULER}"
        )


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if all elements are the same numbers, or NaN in both."""
    return torch.equal(one, other) or bool(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all())


def kind_of(optimizer: Optimizer) -> str:
    """Return the name of `optimizer` in messages."""
    return type(optimizer).__name__
