"""Mistakes of torch.distributed.pipelining (2.13.0) with ordinary models, each as a model that must train right."""

import math
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.model.graph import trace
from funcpipe.model.split import dump_stage, load_stage, split
from tests.model.graph.check import check, total
from tests.model.split.chain import assert_same, even_bounds, run_chain, take_gradients


class Rotary(nn.Module):
    """Attention that turns queries and keys by tables which all layers read; a mask and a learned bias likewise."""

    turns: Tensor

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(13, width)
        self.bias = nn.Embedding(5, 1)
        self.project = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.Linear(width, 13)
        self.register_buffer("turns", 10 ** -torch.linspace(0, 2, width // 2))

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def forward(self, words: Tensor, lengths: Tensor) -> Any:
        x = self.words(words)
        places = torch.arange(words.shape[1])
        angles = torch.outer(places, self.turns).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        distance = (places[:, None] - places[None, :]).clamp(0, 4)
        bias = self.bias(distance).squeeze(-1)
        padding = torch.zeros_like(x[..., 0]).masked_fill(places >= lengths[:, None], -1e4)
        for project in self.project:
            q, k, v = project(x).chunk(3, -1)
            scores = self.turned(q, cos, sin) @ self.turned(k, cos, sin).transpose(1, 2) / math.sqrt(q.shape[-1])
            x = x + F.softmax(scores + bias + padding[:, None], -1) @ v
        return self.out(x)


def test_float_tensors_that_several_stages_read() -> None:
    words, lengths = torch.randint(0, 13, (3, 6)), torch.tensor([6, 2, 4])
    graph = check(Rotary(), (words, lengths), shorter=((words[:2], lengths[:2]), {}))
    read_often = {value.name: value for value in graph.values if len(value.consumers) > 1}
    bias = next(value for value in read_often.values() if value.shape == (6, 6))
    padding = next(value for value in read_often.values() if value.shape == (3, 6))
    assert bias.differentiable
    assert not padding.differentiable
    assert not any(value.shape == (6, 8) for value in graph.values)  # tables of constants are made where they are used


class EncoderDecoder(nn.Module):
    """States of an encoder that every layer of the decoder reads; labels that only the end reads."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 6)
        self.decoder = nn.ModuleList(nn.Bilinear(6, 6, 6) for _ in range(3))
        self.start = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        states = torch.tanh(self.encoder(x))
        y = self.start.expand(x.shape[0], 6)
        for layer in self.decoder:
            y = layer(y, states)
        return {"loss": F.cross_entropy(y, labels), "scores": y}


def test_states_read_by_all_later_stages_and_labels_by_the_last() -> None:
    graph = check(EncoderDecoder(), (torch.randn(4, 4),), {"labels": torch.randint(0, 6, (4,))})
    assert "labels" in graph.layers[-1].inputs
    assert "labels" not in graph.layers[0].inputs


def test_a_constant_that_crosses_gets_no_gradient() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            steps = (x > 0).float()
            return self.b(self.a(x)) * steps

    graph = check(Constant(), (torch.randn(4, 3),))
    assert {value.differentiable for value in graph.values} == {True, False}


class Tied(nn.Module):
    """One weight with three names: two of them next to each other, the third at the other end."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5)
        self.again = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.out = nn.Linear(5, 7, bias=False)
        self.again.weight = self.words.weight
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Any:
        return self.out(self.inner(self.words(x) + self.again(x.flip(1))))


def test_the_gradients_of_tied_weights_can_be_summed_over_stages() -> None:
    model, x = Tied(), torch.randint(0, 7, (4, 6))
    graph = trace(model, (x,))
    stages = []
    for stage in split(graph, [(0, 2), (2, 3), (3, 4)]):
        bundle, tensors = dump_stage(stage, None)
        stages.append(load_stage(bundle, {name: tensor.clone() for name, tensor in tensors.items()})[0])
    run_chain(stages, {"x": x}, total)
    assert stages[0].shared == {"words.weight": "words.weight", "again.weight": "words.weight"}
    assert stages[1].shared == {}
    assert stages[2].shared == {"out.weight": "words.weight"}
    first, last = stages[0].get_parameter("words.weight"), stages[2].get_parameter("out.weight")
    assert stages[0].get_parameter("again.weight") is first
    assert first is not last
    assert first.grad is not None
    assert last.grad is not None
    torch.autograd.backward(total(model(x)))
    assert_same({"": first.grad + last.grad}, {"": model.words.weight.grad}, 1e-6)
    assert [(tie.names, tie.layers) for tie in graph.ties] == [
        (("words.weight", "again.weight", "out.weight"), (0, 1, 3))
    ]


class Layouts(nn.Module):
    """The values that cross are transposed, expanded, strided or channels-last, on which their readers depend."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 1)
        self.c = nn.Linear(8, 8)
        self.d = nn.Linear(8, 4)
        self.row = nn.Parameter(torch.randn(1, 8))

    def forward(self, x: Tensor) -> Any:
        x = self.a(x.contiguous(memory_format=torch.channels_last))
        y = self.b(x)
        rows = y.permute(0, 2, 3, 1).view(x.shape[0], -1, 8)  # works only because y is channels-last
        z = self.c(rows).transpose(1, 2)
        wide = self.row.expand(x.shape[0], 8)
        w = self.d(z.transpose(1, 2)[:, ::2])
        return w.sum(1) + wide[:, :4], z.stride() == (z.shape[1] * z.shape[2], 1, z.shape[1])


def test_layouts_survive_a_cut() -> None:
    x = torch.randn(2, 3, 4, 4)
    graph = check(Layouts(), (x,))
    assert any(value.stride != torch.empty(value.shape).stride() for value in graph.values)


class Cache:
    """An output for generation, with tensors inside that no optimiser needs."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        cache = Cache()
        x = self.a(x)
        cache.kept.append(x)
        x = self.b(x)
        cache.kept.append(x)
        return {"x": x, "past": cache}


def test_caches_in_the_output_are_left_out() -> None:
    model, x = Caching(), torch.randn(4, 3)
    graph = trace(model, (x,))
    output = run_chain(split(graph, even_bounds(2, 2)), {"x": x}, lambda output: output["x"].sum())
    assert torch.equal(output["x"], model(x)["x"])
    assert output["past"] is None
    assert any("output.past (Cache) is dropped" in note for note in graph.notes)


class Stack(nn.Module):
    """A stack of layers of which each is dropped at random."""

    def __init__(self, kind: str, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))
        self.kind = kind

    def drawn(self) -> float:
        if self.kind == "numpy":
            return float(np.random.rand())
        return random.random() if self.kind == "random" else float(torch.rand(()))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            if self.drawn() < 0.5:
                x = x + torch.tanh(layer(x))
        return x


class LayerDrop(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.stack = Stack(kind)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(F.dropout(self.stack(self.first(x)), 0.2, self.training))


@pytest.mark.parametrize("kind", ["torch", "numpy", "random"])
def test_layer_drop_runs_as_one_block(kind: str) -> None:
    model = LayerDrop(kind)
    graph = check(model, (torch.randn(4, 3),), loss=total)
    assert graph.tracer == "eager"
    assert [layer.name for layer in graph.layers] == ["first", "stack", "last"]
    assert graph.layers[1].nodes[0].meta["draws"].names == ("stack",)
    (note,) = graph.notes
    assert re.search(r"one block each: stack: stack \(Stack\), .*test_torch_pipelining.py:\d+: `return .*rand", note)
    (stage,) = split(graph, [(0, 3)])
    outputs = set()
    for step in range(8):
        _, output = stage({"x": torch.ones(1, 3)}, (0, step, 0))
        outputs.add(tuple(output.flatten().tolist()))
    assert len(outputs) == 8  # nothing is frozen
    assert take_gradients(model).keys() == dict(model.named_parameters()).keys()
