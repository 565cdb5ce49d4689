"""Random numbers drawn anywhere in a forward: the same in the plain model and in its stages, however it is cut."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from funcpipe.errors import ModelError
from funcpipe.model.graph import trace
from funcpipe.model.split import split
from funcpipe.training.plain_loop import seeded
from tests.examples import at_most
from tests.model.graph.check import SEED, check
from tests.model.split.chain import take_gradients


class Denoiser(nn.Module):
    """Draws a time and noise for every sample, as diffusion models do in training, and drops out by function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.first = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        time = torch.randint(0, 10, (x.shape[0],))
        noise = torch.randn_like(x)
        hidden = self.drop(torch.relu(self.first(x + noise * 0.5) + self.embed(time)))
        hidden = F.dropout(hidden, 0.2, self.training)
        return self.last(self.drop(hidden)), noise


class Attention(nn.Module):
    """Draws twice in one call, and again without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        q = self.project(x).view(x.shape[0], 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).flatten(1)
        soft = F.gumbel_softmax(self.out(mixed))
        with torch.no_grad():
            kept = (torch.rand(x.shape[0], 1) > 0.3).float()
        return self.out(soft * kept) + torch.normal(0.0, torch.ones(x.shape[0], 8))


class NumpyNoise(nn.Module):
    def forward(self, x: Tensor) -> Any:
        if random.random() < 0.3:
            return x
        return x + torch.as_tensor(np.random.rand(*x.shape), dtype=x.dtype) * torch.rand(1)


class Mixed(nn.Module):
    """A block that draws from three generators, called twice, between functions that draw."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = NumpyNoise()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.noise(F.dropout(x, 0.2))
        x = self.linear(F.dropout(x, 0.2))
        return self.linear(F.dropout(self.noise(x), 0.2))


@pytest.mark.parametrize(("model", "shape"), [(Denoiser, (4, 6)), (Attention, (4, 8)), (Mixed, (4, 4))])
def test_draws_outside_of_modules_are_those_of_the_plain_model(model: type[nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    graph = check(model(), (torch.randn(shape),), shorter=((torch.randn(3, *shape[1:]),), {}))
    assert len(graph.layers) > 1


class Composed(nn.Module):
    """Some modules and functions that draw, of the given kinds."""

    def __init__(self, kinds: Sequence[int]) -> None:
        super().__init__()
        self.kinds = list(kinds)
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in self.kinds)
        self.drop = nn.Dropout(0.2)
        self.block = NumpyNoise()

    def forward(self, x: Tensor) -> Any:
        for kind, part in zip(self.kinds, self.parts, strict=True):
            x = part(self.draw(kind, x))
        return x

    def draw(self, kind: int, x: Tensor) -> Any:
        match kind:
            case 0:
                return self.drop(x)
            case 1:
                return self.block(x)
            case 2:
                return F.dropout(x, 0.3) + torch.rand_like(x)
            case 3:
                return x * torch.bernoulli(torch.full((x.shape[0], 1), 0.8))
            case 4:
                return F.rrelu(x, training=True)
            case 5:
                return x[:, torch.randperm(4)]
            case _:
                return x


@at_most(5)
@given(st.lists(st.integers(0, 6), min_size=6, max_size=6), st.integers(0, 2**32 - 1))
@example([0, 1, 2, 3, 4, 5], 0)
@example([0, 0, 0, 4, 0, 0], 391805128)  # rrelu draws nothing for one of the traced inputs, which are all positive
def test_composed_models_draw_the_same_however_they_are_cut(kinds: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    check(Composed(kinds), (torch.randn(3, 4),))


class DrawsByData(nn.Module):
    """Draws for none of the data that it is traced with, and then for all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        x = F.rrelu(x, training=True) + torch.poisson(torch.relu(-x.detach())) + x[torch.randperm(len(x))]
        return self.linear(x) + torch.rand_like(x)


@pytest.mark.parametrize("factor", [1, -1])
@pytest.mark.parametrize("batch", [3, 1])
def test_a_draw_that_depends_on_the_data_moves_no_later_draw(factor: int, batch: int) -> None:
    torch.manual_seed(0)
    model, x = DrawsByData(), torch.rand(3, 4) + 1
    graph = trace(model, (x,))
    (stage,) = split(graph, [(0, len(graph.layers))])
    x = x[:batch] * factor
    with seeded(model, graph, *SEED):
        expected = model(x)
    assert torch.equal(stage({"x": x}, SEED)[1], expected)


class Checkpointed(nn.Module):
    """Computes a region that draws again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def region(self, x: Tensor) -> Any:
        return F.dropout(torch.tanh(self.drop(self.linear(x))), 0.3)

    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = checkpoint(self.region, x, use_reentrant=False)
        return x


class Unchecked(Checkpointed):
    def forward(self, x: Tensor) -> Any:
        return self.region(self.region(self.region(x)))


def test_a_plain_model_that_recomputes_in_the_backward_draws_the_same_again() -> None:
    torch.manual_seed(0)
    model, x = Unchecked(), torch.randn(5, 4)
    graph = trace(model, (x,))
    gradients = []
    for forward in (Unchecked.forward, Checkpointed.forward):
        drawing = seeded(model, graph, *SEED)
        with drawing:
            output = forward(model, x)
        with drawing:
            torch.autograd.backward(output.square().sum())
        gradients.append((output, take_gradients(model)["linear.weight"]))
    (plain, expected), (again, found) = gradients
    assert torch.equal(plain, again)
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


def test_a_stage_that_recomputes_draws_the_same_again_and_another_micro_batch_does_not() -> None:
    graph = trace(Attention(), (torch.randn(2, 8),))
    (stage,) = split(graph, [(0, len(graph.layers))])
    inputs = {"x": torch.ones(4, 8)}
    (_, one), (_, two), (_, other) = (stage(inputs, seed) for seed in (SEED, SEED, (*SEED[:2], SEED[2] + 1)))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


class OwnGenerator(nn.Module):
    def __init__(self, *, fresh: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.generator = None if fresh else torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Any:
        generator = self.generator or torch.Generator().manual_seed(1)
        return self.linear(x + torch.rand(x.shape, generator=generator))


def test_a_generator_of_the_models_own_is_refused() -> None:
    with pytest.raises(ModelError, match="use torch's global generator"):
        trace(OwnGenerator(fresh=False), (torch.randn(2, 4),))


@torch.library.custom_op("funcpipe_tests::secretly_drawn", mutates_args=())
def secretly_drawn(x: Tensor) -> Tensor:
    """Draws without saying so."""
    return x * torch.rand(())


@secretly_drawn.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Secret(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return torch.ops.funcpipe_tests.secretly_drawn(self.linear(x).detach()) + self.linear(x)


class HoldsSecret(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.secret = Secret()

    def forward(self, x: Tensor) -> Any:
        return self.secret(x) + 1.0


def test_an_operator_that_draws_without_a_tag_is_refused_and_is_fine_in_a_block() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(ModelError, match="nondeterministic_seeded; move it into a module of its own"):
        trace(HoldsSecret(), (x,))
    check(HoldsSecret(), (x,), blocks=("secret",))
