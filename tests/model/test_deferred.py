"""Constructors that are recorded on the meta device, beside the same constructors with memory."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.init import trunc_normal_

from funcpipe.errors import ModelError
from funcpipe.model.deferred import Construction, Made


class Rotary(nn.Module):
    """Caches that are computed, as those of rotary positions are."""

    def __init__(self, dim: int = 8, length: int = 12) -> None:
        super().__init__()
        inverse = 1.0 / (10000 ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float) / dim))
        table = torch.outer(torch.arange(length, dtype=torch.float), inverse)
        self.register_buffer("cos", torch.cat((table, table), dim=-1).cos(), persistent=False)
        self.register_buffer("view", table[2:5].t(), persistent=False)
        self.register_buffer("literal", torch.tensor([0.5, 2.0]) * math.pi)
        mask = torch.full((4, 4), float("-inf"))
        mask.triu_(1)
        mask[0] = 7
        self.register_buffer("mask", mask)
        self.kept = inverse


class Initialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(400, 300)
        self.norm = nn.LayerNorm(5)
        self.other = nn.Linear(400, 300)
        trunc_normal_(self.other.weight, std=0.02)
        self.square = nn.Linear(6, 6)
        nn.init.orthogonal_(self.square.weight, gain=2.0)
        self.narrow = nn.Embedding(9, 3, padding_idx=2).to(torch.bfloat16)


def made(model: nn.Module, construction: Construction, name: str) -> Made:
    found = construction.made(dict((*model.named_parameters(), *model.named_buffers()))[name])
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["cos", "view", "literal", "mask"])
def test_buffers_are_computed_as_by_the_constructor_itself(name: str) -> None:
    construction = Construction()
    model = construction.run(Rotary)
    found, expected = made(model, construction, name).compute(0), dict(Rotary().named_buffers())[name]
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


def test_attributes_without_contents_are_computed() -> None:
    construction = Construction()
    found = construction.made(construction.run(Rotary).kept)  # type: ignore[arg-type]
    assert found is not None
    assert torch.equal(found.compute(0), Rotary().kept)


def test_draws_have_their_distributions_and_depend_on_the_seed_alone() -> None:
    construction = Construction()
    model = construction.run(Initialised)
    weights = [made(model, construction, name) for name in ("linear.weight", "other.weight")]
    first, second = (weight.compute(3) for weight in weights)
    assert first.abs().max() <= 1 / 20  # uniform, between the roots of 1 / 400
    assert first.std().item() == pytest.approx(1 / 20 / math.sqrt(3), rel=0.02)
    assert second.std().item() == pytest.approx(0.02, rel=0.02)
    square = made(model, construction, "square.weight").compute(3)
    assert torch.allclose(square @ square.T, 4 * torch.eye(6), atol=1e-5)
    torch.rand(7)
    assert torch.equal(weights[1].compute(3), second)
    assert not torch.equal(weights[1].compute(4), second)


def test_other_draws_of_a_constructor_are_others() -> None:
    construction = Construction()
    model = construction.run(lambda: nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    assert not torch.equal(*(made(model, construction, f"{i}.weight").compute(0) for i in (0, 1)))


def test_constants_and_conversions_are_kept() -> None:
    construction = Construction()
    model = construction.run(Initialised)
    assert torch.equal(made(model, construction, "norm.weight").compute(0), torch.ones(5))
    half = made(model, construction, "narrow.weight").compute(0)
    assert half.dtype is torch.bfloat16
    assert not half[2].any()


def empty() -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.empty(3))])


def test_what_is_left_without_contents_is_not_made() -> None:
    construction = Construction()
    (weight,) = construction.run(empty).parameters()
    assert construction.made(weight) is None


def asked() -> nn.Module:
    return nn.Linear(int(torch.ones(3).sum()), 2)


@pytest.mark.parametrize(("factory", "message"), [(asked, "meta device"), (lambda: Tensor(), "returns a Tensor")])
def test_factories_that_need_contents_are_refused(factory: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Construction().run(factory)
