"""What is wrong with data, loss, model or optimiser is told at home, by a micro-batch that leaves no trace."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcpipe import DataError, FuncPipeError, InputError, ModelError
from funcpipe.client.prepare.rehearsal import rehearse
from funcpipe.core import OnNan
from funcpipe.model.draws import generator_states
from funcpipe.training.data import LoadedBatch
from funcpipe.training.losses import LossFunction, loss_of_output
from funcpipe.training.recipe import Recipe

SGD = partial(torch.optim.SGD, lr=0.1)
INPUTS, CLASSES = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0])


class Net(nn.Module):
    """A linear layer whose output is changed by `then`."""

    def __init__(self, then: Callable[[Tensor], Any] = lambda output: output) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.then = then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.drop(self.norm(self.hidden(x))))


def told(
    *,
    model: nn.Module | None = None,
    loss: LossFunction = F.cross_entropy,
    optimizer: Any = SGD,
    inputs: Tensor = INPUTS,
    target: Any = CLASSES,
) -> str:
    """What the rehearsal says."""
    torch.manual_seed(1)
    with pytest.raises(InputError) as caught:
        rehearse(
            model or Net(), Recipe(loss=loss, optimizer=optimizer), LoadedBatch(args=(inputs,), target=target), seed=0
        )
    assert isinstance(caught.value, DataError | ModelError)
    return str(caught.value)


def replaced(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed[2, 1] = value
    return changed


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"inputs": replaced(INPUTS, torch.nan)}, "is nan: input 0 holds NaN in 1 of 32 values, first in sample 2 of"),
        (
            {"target": replaced(torch.zeros(4, 3), torch.inf), "loss": F.mse_loss},
            "is inf: target holds an infinity in 1 of 12 values, first in sample 2 of",
        ),
        (
            {"model": Net(lambda x: x.log())},
            "is nan: the first module whose output is not finite is Net. rehearse=False",
        ),
        (
            {"loss": lambda output, target: (output * 0).sum().log()},
            "although the model's output is finite (float32[4, 3])",
        ),
        (
            {"target": CLASSES + 1},
            "float32[4, 3], the target is int64[4] from 1 to 3; class indices must lie between 0 and 2",
        ),
        ({"target": CLASSES.float()}, "class indices must be whole numbers, of dtype torch.int64"),
        (
            {"target": torch.zeros(4, 5), "loss": F.l1_loss},
            "float32[4, 3], the target is float32[4, 5]; their shapes and",
        ),
        (
            {"target": torch.zeros(4), "loss": F.mse_loss, "model": Net(lambda x: x[:, :1])},
            "target is float32[4]; give both",
        ),
        ({"loss": lambda output, target: 1 / 0}, f"on the first micro-batch, in {__file__}:"),
        (
            {"loss": partial(F.cross_entropy, reduction="none")},
            "returns float32[4], not one number: it must return the mean",
        ),
        ({"loss": lambda output, target: F.cross_entropy(output, target).item()}, "returns a float, not a tensor"),
        (
            {"loss": lambda output, target: (output.argmax(1) != target).sum()},
            "which has no gradient: it must return the mean",
        ),
        ({"loss": lambda output, target: F.cross_entropy(output.detach(), target)}, "the loss has no gradient: "),
        (
            {"model": Net(lambda x: (x - x).abs().sqrt())},
            "the gradient of hidden.weight on the first micro-batch is not",
        ),
        ({"optimizer": torch.optim.LBFGS}, "the optimiser LBFGS fails in its first step: TypeError: "),
        (
            {"optimizer": partial(torch.optim.SGD, lr=math.inf)},
            "the first step of the optimiser SGD makes hidden.weight NaN",
        ),
        (
            {"optimizer": partial(torch.optim.Adam, lr=-1)},
            "the optimiser cannot be made: ValueError: Invalid learning rate",
        ),
        ({"inputs": INPUTS[:, :7]}, "the model fails on the first micro-batch: hidden (Linear), "),
    ],
)
def test_a_mistake_is_told_with_its_fact_and_the_way_out(mistake: dict[str, Any], message: str) -> None:
    assert message in told(**mistake)


class Frozen(Net):
    """A model of which only what nobody uses has gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.unused = nn.Parameter(torch.zeros(3))


def test_a_model_without_gradients_is_refused() -> None:
    assert "nothing that requires one leads to it" in told(model=Frozen())
    inputs = INPUTS.clone().requires_grad_()
    assert "no parameter of the model gets a gradient" in told(model=Frozen(), inputs=inputs)


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (F.cross_entropy, CLASSES),
        (partial(F.cross_entropy, ignore_index=0), CLASSES),
        (F.mse_loss, torch.randn(4, 3)),
        (lambda output, target: -(output @ output.T).log_softmax(1).diag().mean(), CLASSES),  # of the batch as a whole
        (lambda output, target: F.cross_entropy(output, target) + torch.rand(()), CLASSES),
        (lambda output, target: output.sum() * 0, CLASSES),
        (lambda output, target: F.mse_loss(output, target["of"][0]), {"of": [torch.randn(4, 3)]}),
    ],
)
def test_what_can_be_trained_with_is_not_refused_and_nothing_is_changed(loss: LossFunction, target: Any) -> None:
    model = Net()
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = INPUTS.clone()
    draws, modes = generator_states(), [module.training for module in model.modules()]
    rehearse(model, Recipe(loss=loss, optimizer=SGD), LoadedBatch(args=(inputs,), target=target), seed=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(parameters[0].grad, torch.ones_like(parameters[0]))
    assert all(parameter.grad is None for parameter in parameters[1:])
    assert generator_states() == draws
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(inputs, INPUTS)


@pytest.mark.parametrize("on_nan", [OnNan.SKIP, OnNan.IGNORE])
def test_a_loss_that_is_not_finite_is_a_warning_where_runs_go_on_with_it(
    on_nan: OnNan, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = Recipe(loss=F.cross_entropy, optimizer=SGD, on_nan=on_nan)
    batch = LoadedBatch(args=(replaced(INPUTS, torch.nan),), target=CLASSES)
    rehearse(Net(), recipe, batch, seed=0)
    assert "first in sample 2 of the dataset; mend or leave out such samples. The run goes on" in caplog.text
    assert f"on_nan is {on_nan.value!r}" in caplog.text


class Output:
    """What a module returns that computes its own loss."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def test_a_model_with_a_loss_of_its_own_is_rehearsed() -> None:
    recipe = Recipe(loss=loss_of_output, optimizer=SGD)
    rehearse(Net(lambda x: Output(x.square().mean())), recipe, LoadedBatch(kwargs={"x": INPUTS}), seed=0)
    with pytest.raises(ModelError, match="the loss of the first micro-batch is nan"):
        rehearse(Net(lambda x: Output(x.log().mean())), recipe, LoadedBatch(kwargs={"x": INPUTS}), seed=0)


def test_large_models_are_updated_some_parameters_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("funcpipe.client.prepare.rehearsal._AT_A_TIME_BYTES", 300)
    seen: list[int] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        own = list(parameters)  # with stand-ins for those of the other stages
        seen.append(sum(parameter.nbytes for parameter in own if parameter.grad is not None))
        return SGD(own)

    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    recipe = Recipe(loss=F.mse_loss, optimizer=optimizer)
    rehearse(model, recipe, LoadedBatch(args=(INPUTS,), target=INPUTS), seed=0)
    assert sum(seen) == sum(parameter.nbytes for parameter in model.parameters())
    assert max(seen) <= 300 + 8 * 8 * 4


def test_errors_are_the_package_s_own() -> None:
    model = Net()
    random.seed(1)
    np.random.seed(1)
    before = generator_states()
    with pytest.raises(FuncPipeError):
        rehearse(model, Recipe(loss=F.cross_entropy, optimizer=SGD), LoadedBatch(args=(INPUTS,), target=None), seed=0)
    assert generator_states() == before
