"""Optimisers and schedulers that are made already, as a script of torch makes them: made again they do the same, or are
refused with the factory to write.
"""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim import lr_scheduler as lr

from funcpipe import FuncPipe
from funcpipe.errors import InputError, InvalidValue
from funcpipe.training.instances import Instances, instances_of
from funcpipe.training.losses import loss_of_output
from funcpipe.training.norms import GradientNorm
from funcpipe.training.state import capture_state
from tests.training.learning import SCHEDULERS, network


class Slow(SGD):
    """An optimiser of a user's own, which keeps an argument where it can be found again."""

    def __init__(self, params: Any, slowness: float = 1.0, **keywords: Any) -> None:
        super().__init__(params, **keywords)
        for group in self.param_groups:
            group["slowness"] = slowness
        self.defaults["slowness"] = slowness


class Wrapping(SGD):
    """One whose constructor needs what it keeps nowhere."""

    def __init__(self, params: Any, inner: Callable[[float], float], lr: float = 0.1) -> None:
        super().__init__(params, lr=inner(lr))


class Remembering(SGD):
    """One with an attribute that its constructor does not make the same again."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.seen: object = object()


def in_groups(model: nn.Module, kind: Callable[..., Optimizer] = AdamW, **keywords: Any) -> Optimizer:
    """With three groups, as the schedulers of `SCHEDULERS` want them."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    first, *others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": [first], "lr": 0.002}, {"params": others, "weight_decay": 0.0}, {"params": decayed}]
    return kind(groups, **{"lr": 0.01, **keywords})


def rebuilt(given: Instances, model: nn.Module) -> tuple[Optimizer, Any]:
    """What a function makes of the same model, from bytes that it is sent."""
    make, make_scheduler = cloudpickle.loads(cloudpickle.dumps((given.make, given.make_scheduler)))
    optimizer = make(list(model.named_parameters()))
    return optimizer, None if make_scheduler is None else make_scheduler(optimizer)


def trained(model: nn.Module, optimizer: Optimizer, scheduler: Any, steps: int = 6) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=draw)
        optimizer.step()
        if scheduler is not None:
            scheduler.step(1.0) if isinstance(scheduler, lr.ReduceLROnPlateau) else scheduler.step()
    return [*model.parameters()]


def agree(make: Callable[[nn.Module], Optimizer], make_scheduler: Callable[[Optimizer], Any] | None = None) -> None:
    model, other = network(), network()
    optimizer = make(model)
    scheduler = None if make_scheduler is None else make_scheduler(optimizer)
    given = instances_of(model, loss_of_output, optimizer, scheduler)
    assert given is not None
    assert not given.has_begun
    found = trained(other, *rebuilt(given, other))
    expected = trained(model, optimizer, scheduler)
    assert all(map(torch.equal, found, expected))
    assert given.has_begun or not optimizer.state


@pytest.mark.parametrize(
    "make",
    [
        lambda model: AdamW(model.parameters(), lr=0.02),
        lambda model: AdamW(model.named_parameters(), lr=torch.tensor(0.02), amsgrad=True),
        lambda model: Adam(model.parameters(), betas=(0.8, 0.9), maximize=True),
        lambda model: SGD(model.parameters(), 0.1, 0.9, nesterov=True),
        lambda model: Adagrad(model.parameters(), initial_accumulator_value=0.3),
        lambda model: RMSprop(model.parameters(), centered=True),
        lambda model: Slow(model.parameters(), 2.0, lr=0.1, momentum=0.5),
        lambda model: SGD([*model.parameters()][::-2], lr=0.1),
        in_groups,
    ],
)
def test_an_optimiser_is_made_again_as_it_is(make: Callable[[nn.Module], Optimizer]) -> None:
    agree(make)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_is_made_again_as_it_is(name: str) -> None:
    agree(functools.partial(in_groups, kind=SGD, momentum=0.9), SCHEDULERS[name])


def test_settings_that_were_changed_since_are_those_of_the_copy() -> None:
    def changed(model: nn.Module) -> Optimizer:
        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["lr"] = 0.02
        return optimizer

    agree(changed)


def test_parameters_that_are_frozen_may_be_in_its_groups() -> None:
    model, other = network(), network()
    next(model.parameters()).requires_grad_(False)
    given = instances_of(model, loss_of_output, SGD(model.parameters(), lr=0.1), None)
    assert given is not None
    named = list(other.named_parameters())[1:]
    assert [len(group["params"]) for group in given.make(named).param_groups] == [len(named)]


def test_a_reset_forgets_what_it_keeps_but_not_its_settings() -> None:
    model = network()
    optimizer = in_groups(model, SGD, momentum=0.9)
    scheduler = lr.StepLR(optimizer, 1, 0.5)
    given = instances_of(model, loss_of_output, optimizer, scheduler)
    assert given is not None
    before = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    trained(model, optimizer, scheduler)
    given.reset()
    assert (optimizer.state_dict(), scheduler.state_dict()) == before
    assert not given.has_begun


def hooked(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def patched(model: nn.Module) -> Optimizer:
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    optimizer.step = types.MethodType(lambda self: None, optimizer)
    return optimizer  # type: ignore[no-any-return]


def scheduled(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.1)
    lr.StepLR(optimizer, 1)
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda model: Wrapping(model.parameters(), lambda rate: rate / 2),
            r"Wrapping, cannot be made again .*; give what makes it: "
            r"optimizer=lambda parameters: Wrapping\(parameters, inner=…, lr=0\.05\)",
        ),
        (
            lambda model: in_groups(model, Remembering, lr=0.3),
            r"Remembering, cannot be made again .*: its seen would be another; give what makes it: "
            r"optimizer=lambda named_parameters: Remembering\(\[\{'params': \[p for name, p in named_parameters if "
            r"name in \('0\.bias',\)\], 'lr': 0\.002\}, .*\], lr=0\.3\)",
        ),
        (hooked, r"SGD, has hooks, .* give that: optimizer=lambda parameters: SGD\(parameters, lr=0\.1\)"),
        (patched, r"step\(\) of the optimiser, SGD, was replaced.*optimizer=lambda parameters: SGD\(parameters"),
        (scheduled, r"a scheduler was made on the optimiser, SGD, .*give it too, scheduler=…"),
        (lambda model: SGD(network().parameters(), lr=0.1), r"SGD, holds 10 parameters that are none of the model's"),
    ],
)
def test_an_optimiser_that_cannot_be_made_again_is_refused(
    make: Callable[[nn.Module], Optimizer], message: str
) -> None:
    model = network()
    with pytest.raises(InputError, match=message):
        FuncPipe(model, loss_fn=nn.functional.cross_entropy, optimizer=make(model))


def test_a_scheduler_of_another_optimiser_is_refused() -> None:
    model = network()
    scheduler = lr.CosineAnnealingLR(SGD(model.parameters(), lr=0.1), T_max=7)
    text = r"lambda optimizer: CosineAnnealingLR\(optimizer, T_max=7\)"
    with pytest.raises(InputError, match=rf"is of another optimiser than the one given; .*, scheduler={text}"):
        FuncPipe(model, optimizer=SGD(model.parameters(), lr=0.1), scheduler=scheduler)
    with pytest.raises(InputError, match=rf"give that too, optimizer=scheduler.optimizer, or .*, scheduler={text}"):
        FuncPipe(model, optimizer=functools.partial(SGD, lr=0.1), scheduler=scheduler)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("bf16-mixed", "bf16"), ("16-mixed", "fp16"), ("32-true", "fp32"), (32, "fp32"), (16, "fp16")),
        *(("no", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")),
    ],
)
def test_names_of_precisions_that_others_use_are_understood(name: Any, meant: str) -> None:
    assert FuncPipe(network(), precision=name)._recipe.precision.value == meant


def test_a_precision_of_parameters_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidValue, match=r"one of fp32, bf16, fp16, in which parameters stay .*, got 'bf16-true'"):
        FuncPipe(network(), precision="bf16-true")


class Inheriting(Slow):
    """Has the constructor of another."""


def test_an_optimiser_without_a_constructor_of_its_own_is_made_again() -> None:
    agree(lambda model: Inheriting(model.parameters(), 2.0, lr=0.1, momentum=0.5))


def test_without_a_scheduler_a_reset_forgets_what_the_optimiser_keeps() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = instances_of(model, loss_of_output, optimizer, None)
    assert given is not None
    before = copy.deepcopy(optimizer.state_dict())
    trained(model, optimizer, None)
    optimizer.param_groups[0]["lr"] = 0.01
    given.reset()
    assert optimizer.state_dict() == before
    assert not given.has_begun


def test_a_state_without_an_optimiser_leaves_the_given_one_as_it_is() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = instances_of(model, loss_of_output, optimizer, None)
    assert given is not None
    trained(model, optimizer, None)
    before = copy.deepcopy(optimizer.state_dict())
    given.restore(capture_state(model, None, GradientNorm()))
    found = optimizer.state_dict()
    assert found["param_groups"] == before["param_groups"]
    assert all(
        torch.equal(kept["momentum_buffer"], found["state"][i]["momentum_buffer"])
        for i, kept in before["state"].items()
    )
