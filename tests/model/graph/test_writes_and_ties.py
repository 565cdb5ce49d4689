"""Operations in place, frozen parameters, tied weights: where memory or a parameter has more than one name."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.model.graph.check import check


class InPlace(nn.Module):
    """Writes into activations in every way: methods, operators, items, views, modules, an input."""

    def __init__(self, view_late: bool) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 6)
        self.d = nn.Linear(6, 6)
        self.act = nn.Hardswish(inplace=True)
        self.view_late = view_late

    def forward(self, x: Tensor) -> Any:
        x.mul_(2)
        y = self.a(x)
        y.add_(1.0)
        z = self.b(y)
        z += y
        z[:, 0] = z[:, 1] * 2
        view = z[:, 2:4]
        w = self.c(self.act(z) * 1.0)
        if self.view_late:
            view *= 3
        w[1:].clamp_(min=-0.5)
        return self.d(w) + z, view, x


@pytest.mark.parametrize("view_late", [False, True])
def test_operations_in_place(view_late: bool) -> None:
    graph = check(InPlace(view_late), (torch.randn(4, 4),), shorter=((torch.randn(2, 4),), {}))
    assert len(graph.layers) == (3 if view_late else 4)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
        self.adapter = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.never = nn.Linear(3, 3)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            weight = torch.sigmoid(self.adapter(x))
        return self.head(self.body(x) + weight * self.adapter(x)), F.softmax(self.body(x), 1).detach()


def test_frozen_parameters_and_code_without_gradients() -> None:
    graph = check(Frozen(), (torch.randn(4, 4),))
    assert [value.differentiable for value in graph.values if value.name == "body.0"] == [False]
    assert not graph.values[-1].differentiable


class WithoutParameters(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.cos(), x


def test_a_model_without_parameters() -> None:
    graph = check(WithoutParameters(), (torch.randn(4, 4),))
    assert [layer.name for layer in graph.layers] == ["WithoutParameters"]


def test_a_model_that_is_one_module() -> None:
    graph = check(nn.Linear(3, 2), (torch.randn(4, 3),))
    assert [layer.name for layer in graph.layers] == ["Linear"]


class TiedThrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.inner = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.inner[1].weight = self.inner[0].weight
        self.decode = nn.Linear(6, 11, bias=False)
        self.decode.weight = self.words.weight

    def forward(self, x: Tensor) -> Any:
        x = self.words(x)
        for layer in (*self.inner, *self.inner):
            x = layer(x)
        return self.decode(x), F.linear(x, self.words.weight)


def test_tied_weights_and_shared_modules() -> None:
    graph = check(TiedThrice(), (torch.randint(0, 11, (3, 4)),))
    assert [layer.name for layer in graph.layers] == ["words", "inner.0", "inner.1", "inner.0#2", "inner.1#2", "decode"]
