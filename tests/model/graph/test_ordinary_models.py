"""Ordinary modules: each kind is traced, cut everywhere, and compared with the plain module."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.model.graph.check import check, total
from tests.model.graph.models import CausalTransformer, Encoder, ResidualNet


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (ResidualNet(), torch.randn(4, 1, 8, 8)),
        (CausalTransformer(), torch.randint(0, 23, (4, 12))),
        (Encoder(), torch.randn(4, 6, 5)),
    ],
)
def test_models_of_every_day(model: nn.Module, x: Tensor) -> None:
    graph = check(model, (x,), shorter=((x[:3],), {}))
    assert graph.tracer == "fx"
    assert graph.batched == graph.inputs


class UNet(nn.Module):
    """Long skip connections, with sizes that do not fit and are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 2, 1)

    def join(self, skip: Tensor, x: Tensor) -> Tensor:
        rows, columns = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
        return torch.cat([skip, F.pad(x, (0, columns, 0, rows))], 1)

    def forward(self, x: Tensor) -> Any:
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(self.pool(a)))
        c = F.relu(self.middle(self.pool(b)))
        d = self.join(b, self.up2(c))
        return self.out(self.join(a, self.up1(d)))


def test_long_skip_connections_with_padding() -> None:
    graph = check(UNet(), (torch.randn(2, 1, 11, 14),), shorter=((torch.randn(1, 1, 11, 14),), {}))
    assert max(len(value.consumers) for value in graph.values) >= 2


class Dense(nn.Module):
    """Every layer reads the outputs of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3 + 2 * i, 2) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(3 + 2 * i) for i in range(4))

    def forward(self, x: Tensor) -> Any:
        features = [x]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            features.append(layer(F.relu(norm(torch.cat(features, 1)))))
        return torch.cat(features, 1)


def test_dense_connections_send_a_tensor_once_to_all_its_readers() -> None:
    graph = check(Dense(), (torch.randn(4, 3),))
    first = next(value for value in graph.values if value.name == "layers.0")
    assert first.consumers == (3, 5, 7)
    assert graph.layers[-1].inputs == ("x",)  # an input of the model read at its end


class Answer(NamedTuple):
    scores: Tensor
    extra: Tensor | None


@dataclass
class Report:
    answer: Answer
    parts: dict[str, Any]
    note: str = "as ever"
    nothing: None = None


class ManyWays(nn.Module):
    """Keyword arguments, masks, a mapping and a tuple as inputs; a dataclass with all kinds of things as output."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.image = nn.Linear(5, 6)
        self.mix = nn.Linear(6, 6)
        self.rnn = nn.LSTM(6, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(
        self,
        words: Tensor,
        *,
        batch: dict[str, Any],
        mask: Tensor | None = None,
        scale: float = 1.0,
        deep: bool = False,
    ) -> Any:
        x = self.words(words)
        if batch["image"] is not None:
            x = x + self.image(batch["image"]).unsqueeze(1)
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        x = self.mix(x) * scale
        x, (h, c) = self.rnn(x)
        scores = self.head(x if deep else h[-1])
        kept = mask.sum(1) if mask is not None else None
        return Report(Answer(scores, None), {"cell": c, "kept": kept, "layers": [x, 3]})


def test_every_way_to_pass_and_return_things() -> None:
    words, image = torch.randint(0, 9, (4, 7)), torch.randn(4, 5)
    mask = torch.arange(7) < torch.tensor([[7], [3], [5], [1]])
    kwargs = {"batch": {"image": image, "unused": None}, "mask": mask, "scale": 0.5}
    few = {"batch": {"image": image[:2], "unused": None}, "mask": mask[:2], "scale": 0.5}
    graph = check(ManyWays(), (words,), kwargs, shorter=((words[:2],), few))
    assert graph.inputs == ("words", "batch.image", "mask")
    assert "mask" in graph.layers[-1].inputs  # read from the data again, not sent along
    without = check(ManyWays(), (words,), {"batch": {"image": None}})
    assert without.inputs == ("words",)


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        return [layer(x) + named["bias"] for layer, x in zip(self.layers, inputs, strict=True)]


def test_any_number_of_inputs() -> None:
    graph = check(Positional(), tuple(torch.randn(2, 3) for _ in range(3)), {"bias": torch.randn(2, 3)})
    assert graph.inputs == ("inputs.0", "inputs.1", "inputs.2", "named.bias")


class Numbers(nn.Module):
    """Python numbers that come from shapes, constants made on the way, buffers, and a scalar parameter."""

    offset: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("offset", torch.tensor(2.0))
        self.register_buffer("table", torch.arange(12.0).view(3, 4), persistent=False)
        self.plain = torch.linspace(0, 1, 4)

    def forward(self, x: Tensor) -> Any:
        batch, length, width = x.shape
        x = self.a(x).reshape(batch * length, width) * self.plain
        x = self.b(x) * self.scale + self.offset
        generator_states = torch.arange(length) % self.table.shape[0]
        x = x.view(batch, length, width) + self.table[generator_states]
        x = self.c(x) / (batch * length)
        for i in range(length):
            x = x + float(i) * x.new_ones(batch, 1, width)
        return x.view(x.size(0), -1), torch.full((batch,), width)


def test_numbers_constants_and_buffers_need_not_travel() -> None:
    graph = check(Numbers(), (torch.randn(4, 5, 4),), shorter=((torch.randn(3, 5, 4),), {}))
    assert not any(value.scalar for value in graph.values)
    assert all(value.differentiable for value in graph.values)


class Uneven(nn.Module):
    """A number that does not follow the batch size along a line."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        half = x.shape[0] // 2
        return self.b(self.a(x))[:half]


def test_a_number_that_must_travel_does() -> None:
    graph = check(Uneven(), (torch.randn(6, 4),), shorter=((torch.randn(5, 4),), {}))
    assert graph.tracer in ("fx", "export")


def test_the_loss_may_be_the_models_own() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 3)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            scores = self.b(self.a(x))
            return {"loss": F.cross_entropy(scores, labels) if labels is not None else None, "scores": scores}

    kwargs = {"labels": torch.randint(0, 3, (4,))}
    graph = check(WithLoss(), (torch.randn(4, 4),), kwargs, loss=lambda output: output["loss"])
    assert graph.layers[-1].inputs == ("labels",)
    assert total({"a": torch.zeros(2)}) == 0
