"""Operations in place, frozen parameters, tied weights: where memory or a parameter has more than one name."""

from collections.abc import Callable
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


class WrittenThroughAView(nn.Module):
    """Writes to a value that nothing reads any more, under the name of a view of it, or of what returned it."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.between = between
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.act(self.between(self.norm(self.first(x)))).reshape(len(x), 4))


@pytest.mark.parametrize(
    "between", [nn.Identity(), nn.Unflatten(1, (2, 2)), nn.Sequential(nn.Flatten(), nn.Dropout(0))]
)
def test_a_value_is_written_to_under_another_name_behind_a_cut(between: nn.Module) -> None:
    assert len(check(WrittenThroughAView(between), (torch.randn(4, 4),)).layers) >= 5


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


class FillsPieceByPiece(nn.Module):
    """Writes what it computes into a tensor that it has made before, by `write`."""

    def __init__(self, write: Callable[[Tensor, int, Tensor], Any]) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.b = nn.Linear(4, 4)
        self.write = write

    def forward(self, x: Tensor) -> Any:
        whole = x.new_zeros(x.shape[0], 4)
        doubled = whole * 2
        for i in range(2):
            self.write(whole, 2 * i, self.norm(self.a(x + i))[:, :2])
        return self.b(whole), doubled


def _assign(whole: Tensor, start: int, part: Tensor) -> None:
    whole[:, start : start + 2] = part


def _copy_to_view(whole: Tensor, start: int, part: Tensor) -> None:
    whole[:, start : start + 2].copy_(part)


def _copy_by_index(whole: Tensor, start: int, part: Tensor) -> None:
    whole.index_copy_(1, torch.tensor([start, start + 1]), part)


@pytest.mark.parametrize("write", [_assign, _copy_to_view, _copy_by_index])
@pytest.mark.parametrize("blocks", [(), ("a",)])
def test_gradients_pass_a_tensor_that_is_filled_after_it_was_made(write: Any, blocks: tuple[str, ...]) -> None:
    graph = check(FillsPieceByPiece(write), (torch.randn(3, 4),), blocks=blocks)
    assert len(graph.layers) == 5
