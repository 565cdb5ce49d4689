"""Optimisers and schedulers that cannot work are refused when a FuncPipe is made or a job prepared, and told why."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as lr

from funcpipe import FuncPipe
from funcpipe.core import Interval, OptimizerKind
from funcpipe.errors import InputError, InvalidValue
from funcpipe.training.optimizers import ParameterShape, trainable_shapes
from funcpipe.training.recipe import Recipe, SchedulerFactory
from funcpipe.training.recipe_trial import check_recipe, optimizer_kind

MODEL = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 4))
SHAPES = trainable_shapes(MODEL)


@functools.cache
def adam() -> Optimizer:
    """An optimiser of the model; the first one loads torch's compiler, and so it is not made while tests are found."""
    return AdamW(MODEL.parameters())


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def improvised(parameters: Any) -> Optimizer:
    optimizer = momentum(parameters)
    lr.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    return optimizer


def hooked(parameters: Any) -> Optimizer:
    optimizer = momentum(parameters)
    plateau = lr.ReduceLROnPlateau(optimizer)
    optimizer.register_step_post_hook(lambda *_: plateau.step(1.0))
    return optimizer


def patched(parameters: Any) -> Optimizer:
    optimizer = momentum(parameters)
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)  # type: ignore[method-assign, assignment]
    return optimizer


class Counting(SGD):
    """Keeps the number of its steps where no checkpoint looks for it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        self.param_groups[0]["lr"] = 0.1 / self.steps
        return super().step(closure)


class Sharing(SGD):
    """Keeps something for all parameters together."""

    def step(self, closure: Any = None) -> Any:
        self.state["all"] = {"steps": 1}  # type: ignore[index]
        return super().step(closure)


class Demanding(SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            lambda parameters: AdamW(MODEL.parameters()),
            r"AdamW, holds 6 parameters that its factory was not given, .*16, 6",
        ),
        (lambda parameters: None, "the optimiser factory returns a NoneType; it must return a torch.optim.Optimizer"),
        (lambda parameters: AdamW(parameters, lr=-0.1), "cannot be made: ValueError: Invalid learning rate: -0.1; opt"),
        (
            lambda parameters: AdamW(parameters, lr=float("nan")),
            "cannot be made: ValueError: Invalid learning rate: nan",
        ),
        (
            lambda parameters: SGD(parameters, lr=float("inf")),
            "the learning rate of the optimiser's group 0 is inf; it m",
        ),
        (
            lambda model: AdamW(model.parameters()),
            "AttributeError: .*; optimizer= is called with a list of the model's 6",
        ),
        (
            lambda named_parameters: SGD(named_parameters, lr=-1.0),
            "called with .* 6 trainable pairs of name and parameter",
        ),
        (lambda parameters: SGD([{"params": []}], lr=0.1), "SGD, holds none of the model's 6 trainable parameters"),
        (optim.LBFGS, "LBFGS, needs a closure in its step"),
        (lambda parameters: Demanding(parameters, lr=0.1), "Demanding, needs a closure in its step"),
        (lambda parameters: Sharing(parameters, lr=0.1), "the optimiser keeps state for a str that is none of its par"),
        (improvised, "the optimiser factory also makes a learning-rate scheduler, .*; give the schedule as scheduler="),
        (hooked, "registers hooks on its SGD, .* or give the schedule as scheduler="),
        (patched, r"replaces the step\(\) of its SGD, .* or give the schedule as scheduler="),
        (
            Counting,
            r"Counting, does not continue from its saved state .*0\.weight differs.*, give the schedule as scheduler=",
        ),
    ],
)
def test_an_optimiser_that_cannot_work_is_refused_at_once(factory: Callable[..., Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FuncPipe(MODEL, optimizer=factory)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            lambda: {"optimizer": "adam"},
            "optimizer must be a function that makes one in each stage, such as `lambda parameters: ",
        ),
        (
            lambda: {"scheduler": lr.StepLR, "scheduler_interval": "batch"},
            "scheduler_interval must be one of step, epoch, got 'ba",
        ),
        (lambda: {"average": 0.999}, "average must be an EMA or SWA of funcpipe"),
    ],
)
def test_what_is_no_factory_is_refused_at_once(fields: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        FuncPipe(MODEL, **{"optimizer": momentum, **fields()})


def counted() -> SchedulerFactory:
    numbers: Iterator[int] = iter(range(1000))
    return lambda optimizer: lr.LambdaLR(optimizer, lambda n: 1 / (1 + next(numbers)))


class Growing(lr.StepLR):
    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch == 4:
            self.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


class Unsaved(lr.StepLR):
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, 2)
        self.callback = print


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (
            lambda optimizer: [lr.StepLR(optimizer, 1)],
            "the scheduler factory returns a list; it must return a scheduler",
        ),
        (
            lambda optimizer: lr.StepLR(adam(), 1),
            "the StepLR .* is of another optimiser than the one that the factory is giv",
        ),
        (lambda optimizer: lr.ExponentialLR(optimizer, gamma=int("a")), "the scheduler cannot be made: ValueError"),
        (
            lambda optimizer: lr.OneCycleLR(optimizer, 0.1, total_steps=10),
            "OneCycleLR fails at its step 11 of the 20 that this run takes: .*; it is stepped after each training step",
        ),
        (counted(), r"the LambdaLR does not continue from its state_dict\(\) as if it had not been interrupted"),
        (lambda optimizer: Growing(optimizer, 2), "the Growing (adds parameter groups|fails at its step)"),
        (
            Unsaved,
            "the scheduler cannot be saved: the scheduler keeps a builtin_function_or_method .scheduler/callback",
        ),
        (
            lr.ReduceLROnPlateau,
            "ReduceLROnPlateau is stepped with 'val_loss' of each validation, and this run has none",
        ),
    ],
)
def test_a_scheduler_that_cannot_work_for_the_run_is_refused(scheduler: SchedulerFactory, message: str) -> None:
    recipe = Recipe(
        loss=nn.functional.cross_entropy,
        optimizer=momentum,
        scheduler=scheduler,
        scheduler_interval=Interval.STEP,
    )
    with pytest.raises(InputError, match=message):
        check_recipe(recipe, SHAPES, steps=20, epochs=5, has_validation=False)


class Odd(nn.Module):
    """Parameters of dtypes and shapes that are seldom seen."""

    def __init__(self) -> None:
        super().__init__()
        self.complex = nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))
        self.float16 = nn.Parameter(torch.zeros((), dtype=torch.float16))
        self.bfloat_16 = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.zeros(0, 3))


@pytest.mark.parametrize("model", [Odd(), nn.LazyLinear(3), nn.Linear(2, 2).requires_grad_(False)])
def test_unusual_parameters_are_no_reason_to_refuse(model: nn.Module) -> None:
    assert FuncPipe(model, optimizer=AdamW).model is model


def test_a_class_in_place_of_a_module_is_refused() -> None:
    with pytest.raises(InputError, match=r"model must be a module, not its class: FuncPipe\(Odd"):
        FuncPipe(Odd, optimizer=AdamW)


FACTORIES: list[Callable[..., Optimizer]] = [
    functools.partial(SGD, lr=0.1),
    functools.partial(Adam, lr=torch.tensor(0.1)),
    *(optim.Adadelta, optim.Adagrad, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop),
    functools.partial(AdamW, lr=0.1, amsgrad=True, fused=True),
]


@pytest.mark.parametrize("factory", FACTORIES)
def test_ordinary_optimisers_are_not_refused(factory: Callable[..., Optimizer]) -> None:
    assert FuncPipe(MODEL, optimizer=factory).model is MODEL


def test_an_optimiser_of_transformers_is_not_refused() -> None:
    from transformers import Adafactor  # takes long, and others are collected without it

    assert FuncPipe(MODEL, optimizer=Adafactor).model is MODEL


def test_a_plateau_with_validation_is_not_refused() -> None:
    recipe = Recipe(loss=nn.functional.cross_entropy, optimizer=momentum, scheduler=lr.ReduceLROnPlateau)
    check_recipe(recipe, SHAPES, steps=20, epochs=5, has_validation=True)
    with pytest.raises(InputError, match="train with validation=, or choose a scheduler that needs none"):
        check_recipe(recipe, SHAPES, steps=20, epochs=5, has_validation=False)


def test_a_large_model_is_tried_without_its_memory() -> None:
    large = [ParameterShape(name=f"{i}.weight", shape=(1 << 20, 1 << 10), dtype=torch.float32) for i in range(20)]
    check_recipe(Recipe(loss=nn.functional.cross_entropy, optimizer=AdamW), large)
    assert optimizer_kind(AdamW, large).values_per_parameter == 2


@pytest.mark.parametrize(
    ("factory", "kind"),
    [
        (functools.partial(optim.SGD, lr=0.1), OptimizerKind.SGD),
        (functools.partial(optim.SGD, lr=0.1, momentum=0.9), OptimizerKind.MOMENTUM),
        (optim.Adam, OptimizerKind.ADAM),
    ],
)
def test_the_kind_of_an_optimiser_follows_from_what_it_keeps(
    factory: functools.partial[Optimizer], kind: OptimizerKind
) -> None:
    assert optimizer_kind(factory) is kind
