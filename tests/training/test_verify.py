"""States are compared tensor by tensor, and one process draws the random numbers that stages draw."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from funcpipe.model.graph import trace
from funcpipe.training.batches import Step
from funcpipe.training.plain import train_in_one_process
from funcpipe.training.recipe import Recipe
from funcpipe.training.verify import compare_states

SGD = partial(torch.optim.SGD, lr=0.1)
STEPS = [Step(number=0, epoch=0, micro_batches=((0, 1), (2,))), Step(number=1, epoch=0, micro_batches=((3, 4), (5,)))]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, generator=generator), torch.randn(2, generator=generator)) for _ in range(6)]


def train(seed: int = 0, *, clip: float | None = None, reverse: bool = False) -> dict[str, Tensor]:
    graph = trace(model(), (torch.zeros(2, 3),))
    loss = nn.functional.mse_loss
    trained = train_in_one_process(
        model(),
        graph,
        data(),
        STEPS,
        recipe=Recipe(loss=loss, optimizer=SGD, clip_grad_norm=clip),
        seed=seed,
        reverse=reverse,
    )
    return trained.state_dict()


def test_training_in_one_process_depends_on_nothing_but_the_seed() -> None:
    first = train()
    torch.manual_seed(99)
    again = train()
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = train(seed=1)
    assert not torch.equal(first["0.weight"], other["0.weight"])
    clipped = train(clip=1e-6)
    assert torch.allclose(clipped["0.weight"], model().state_dict()["0.weight"], atol=1e-5)
    assert torch.allclose(train(reverse=True)["0.weight"], first["0.weight"], atol=1e-6)


class Remembers(nn.Module):
    """Leaves in a list what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 2)
        self.last: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.last[:] = [self.inner(x)]
        return self.last[0]


def test_a_model_that_was_called_before_is_trained_like_one_that_was_not() -> None:
    fresh, called = Remembers(), Remembers()
    called(torch.ones(2, 3))
    graph, loss = trace(called, (torch.zeros(2, 3),)), nn.functional.mse_loss
    states = [
        train_in_one_process(made, graph, data(), STEPS, recipe=Recipe(loss=loss, optimizer=SGD), seed=0).state_dict()
        for made in (fresh, called)
    ]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert called.last[0].grad_fn is not None


def test_the_first_tensor_that_differs_is_found_in_order_of_layers() -> None:
    graph = trace(model(), (torch.zeros(2, 3),))
    expected = {**model().state_dict(), "empty": torch.zeros(0)}
    same = compare_states(graph, expected, expected, steps=2)
    assert same.agrees
    assert [tensor.name for tensor in same.tensors] == ["0.weight", "0.bias", "2.weight", "2.bias", "empty"]
    assert same.tensors[-1].layer == "outside the graph"
    moved = {**expected, "2.weight": expected["2.weight"] * 1.5, "2.bias": expected["2.bias"] * math.nan}
    found = compare_states(graph, moved, expected, steps=2)
    assert not found.agrees
    assert found.first_difference == found.tensors[2]
    assert found.first_difference.difference == pytest.approx(0.5)
    no_numbers = compare_states(graph, {**moved, "2.weight": expected["2.weight"]}, expected, steps=2)
    assert no_numbers.first_difference is not None
    assert no_numbers.first_difference.name == "2.bias"


class Tokens(nn.Module):
    """Mixes a picture twice and makes tokens of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.picture = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.pool = nn.AvgPool2d(3, stride=1, padding=1)
        self.mix = nn.Conv2d(4, 4, 1)
        self.scale = nn.Parameter(torch.full((1, 4, 1, 1), 0.5))
        self.tokens = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.picture(x)
        x = x + self.scale * (self.pool(x) - x)
        x = x + self.scale * self.mix(x)
        tokens: Tensor = self.tokens(x.flatten(2).transpose(1, 2))
        return tokens.mean(1)


def test_training_in_one_process_does_what_a_loop_of_ones_own_does_where_kernels_look_at_strides() -> None:
    """Autograd adds gradients up in place, but not below a dispatch mode. The sum has other strides then for a batch of
    one, and the backward of torch's BatchNorm2d other results.
    """
    generator = torch.Generator().manual_seed(1)
    pictures = [(torch.randn(1, 3, 3, generator=generator), torch.randn(2, generator=generator)) for _ in range(2)]
    steps = [Step(number=0, epoch=0, micro_batches=((0,), (1,)))]
    own, loss = Tokens(), nn.functional.mse_loss
    optimizer = SGD(own.parameters())
    for picture, target in pictures:
        torch.autograd.backward(loss(own(picture[None]), target[None]) / 2)
    optimizer.step()
    graph = trace(Tokens(), (torch.zeros(2, 1, 3, 3),))
    trained = train_in_one_process(Tokens(), graph, pictures, steps, recipe=Recipe(loss=loss, optimizer=SGD), seed=0)
    assert all(torch.equal(tensor, own.state_dict()[name]) for name, tensor in trained.state_dict().items())
