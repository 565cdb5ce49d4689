"""Groups of optimisers that are found again or refused, and optimisers that may be cut, or not."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from funcpipe.core import OnNan, Reduction, Routes
from funcpipe.errors import InvalidValue, ModelError, PlanError
from funcpipe.training.losses import loss_of_output
from funcpipe.training.optimizer_division import check_sharding, check_stages, reason_for_one_stage
from funcpipe.training.optimizers import (
    ParameterShape,
    capture_groups,
    join_tensors,
    restore_groups,
    split_tensors,
    trainable_shapes,
)
from funcpipe.training.recipe import Recipe

MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)
NO_ROUTES = Routes(activations=(), gradients=())


def shapes_of(*names: str, dtype: torch.dtype = torch.float32) -> list[ParameterShape]:
    return [ParameterShape(name=name, shape=(3, 4), dtype=dtype) for name in names]


def groups(*members: tuple[list[nn.Parameter], float]) -> SGD:
    return SGD([{"params": parameters, "lr": rate} for parameters, rate in members], lr=1.0)


def test_a_class_of_modules_is_no_model() -> None:
    kind: Any = nn.Linear
    with pytest.raises(ModelError, match=r"must be an nn.Module that is made already, got <class"):
        trainable_shapes(kind)


def test_parameters_that_had_different_settings_must_stay_apart() -> None:
    a, b = (nn.Parameter(torch.zeros(2)) for _ in "ab")
    tensors: dict[str, Tensor] = {}
    saved = capture_groups(groups(([a], 0.1), ([b], 0.2)), [["a"], ["b"]], tensors)
    with pytest.raises(PlanError, match="different optimiser settings are now in one group; keep the optimiser as it"):
        restore_groups(saved, groups(([a, b], 0.1)), [["a", "b"]], tensors)


def test_a_group_that_is_empty_and_of_which_nothing_is_saved_keeps_its_settings() -> None:
    a = nn.Parameter(torch.zeros(2))
    tensors: dict[str, Tensor] = {}
    saved = capture_groups(groups(([a], 0.1)), [["a"]], tensors)
    now = groups(([a], 0.5), ([], 0.7))
    restore_groups(saved, now, [["a"], []], tensors)
    assert [group["lr"] for group in now.param_groups] == [0.1, 0.7]


def test_dictionaries_with_numbers_for_keys_come_back_from_text() -> None:
    state = {1: torch.ones(2), 2.5: [3, "text"], "word": None}
    tensors: dict[str, Tensor] = {}
    found = join_tensors(json.loads(json.dumps(split_tensors(state, "optimizer/a", tensors))), tensors)
    assert [type(key) for key in found] == [int, float, str]
    assert torch.equal(found.pop(1), torch.ones(2))
    assert found == {2.5: [3, "text"], "word": None}


@pytest.mark.parametrize("names", [("a",), ("a", "b"), ("a", "b", "c")])
def test_models_of_few_parameters_in_half_precision_may_be_cut_too(names: tuple[str, ...]) -> None:
    """The gradients that are tried stay in its range, in which infinities would hide differences."""
    assert reason_for_one_stage(MOMENTUM, shapes_of(*names, dtype=torch.float16)) is None


class Noisy(SGD):
    """Adds noise to each parameter in turn."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn(parameter.shape), alpha=group["lr"])
        return super().step(closure)


def test_an_optimiser_that_draws_is_refused_in_two_stages_but_not_in_one() -> None:
    """In one it draws as plain training does, whatever the forward does not use."""
    shapes, noisy = shapes_of("a", "b", "idle"), partial(Noisy, lr=0.1)
    check_stages(noisy, shapes, [["a", "b"]], together=("a", "b"))
    with pytest.raises(PlanError, match="it draws random numbers one parameter after the other"):
        check_stages(noisy, shapes, [["a"], ["b"]], together=("a", "b"))


class Listing(SGD):
    """Keeps a list for each parameter."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("seen", []).append(1.0)
        return found


class Slowing(SGD):
    """Counts steps from the beginning in a number of each parameter, by which the gradient is divided."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] += 1
                    parameter.sub_(parameter.grad * (group["lr"] / state["count"]))


def test_an_optimiser_that_keeps_more_than_numbers_and_tensors_is_not_divided() -> None:
    shapes, stages = shapes_of("a", "b"), [["a", "b"]]
    check_sharding(Slowing, shapes, stages, NO_ROUTES)
    with pytest.raises(PlanError, match="Listing keeps something for a parameter that cannot be cut with it"):
        check_sharding(partial(Listing, lr=0.1), shapes, stages, NO_ROUTES)


def test_a_recipe_wants_a_factory_and_not_an_optimiser() -> None:
    made: Any = SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(InvalidValue, match=r"optimizer.*AdamW.*not one that is made already"):
        Recipe(loss=loss_of_output, optimizer=made)


def test_a_recipe_says_what_its_losses_are_means_over() -> None:
    def over(**fields: Any) -> str | None:
        return Recipe(loss=loss_of_output, optimizer=MOMENTUM, on_nan=OnNan.STOP, **fields).loss_over

    assert over() is None
    assert over(reduction=Reduction.WEIGHTED) == "the weights that the loss returns"
    assert over(reduction=Reduction.TOKENS) == "targets that are not ignored"
