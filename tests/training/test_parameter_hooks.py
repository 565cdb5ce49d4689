"""Hooks of parameters: what they may return and reach, and when they do not run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.training.parameter_hooks import ParameterHooks, check_hooks, try_hooks


def test_a_hook_that_returns_no_tensor_is_refused() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad = torch.ones(1, 2)
    hook: Any = lambda gradient: "text"  # noqa: E731
    with pytest.raises(ModelError, match=r"hook of weight fails on the gradient .*: it returns a str, which must be a"):
        try_hooks(model, {"weight": (hook,)}, seed=0, scales_loss=False)


def test_hooks_see_the_gradient_of_the_loss_itself_and_do_not_run_where_it_has_overflowed() -> None:
    seen: list[Tensor] = []

    def at_most_one(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient.clamp(max=1.0)

    weight = nn.Parameter(torch.zeros(2))
    hooks = ParameterHooks({"weight": (at_most_one,)}, {"weight": weight}, seed=0)
    hooks.begin_step(0)
    overflowed = torch.tensor([1.0, torch.inf])
    assert hooks.gradient(weight, overflowed, loss_factor=4.0) is overflowed
    assert not seen
    hooks.begin_step(1)
    found = hooks.gradient(weight, torch.tensor([2.0, 8.0]), loss_factor=4.0)
    assert found is not None
    assert found.tolist() == [2.0, 4.0]
    assert [gradient.tolist() for gradient in seen] == [[0.5, 2.0]]


def test_a_hook_that_removes_itself_is_refused() -> None:
    model, handles = nn.Linear(2, 1), list[Any]()

    def once(gradient: Tensor) -> None:
        handles[0].remove()

    handles.append(model.weight.register_hook(once))  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match=r"hook of weight reaches a handle that removes hooks, by .*return None"):
        check_hooks(model, list(model.parameters()))


def test_hooks_are_tried_on_parameters_with_a_gradient_alone() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad = torch.ones(1, 2)
    try_hooks(model, dict.fromkeys(("bias", "weight"), (torch.neg,)), seed=0, scales_loss=True)
    assert model.bias.grad is None
    assert model.weight.grad.tolist() == [[-1.0, -1.0]]
