"""Layers that autocast, gradient checkpointing, torch's containers and lists of parameters do not hide."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.model.graph import trace
from tests.examples import in_long_run
from tests.model.graph.check import check


class Casts(nn.Module):
    """Three layers in bfloat16, and one in float32."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.by_data = by_data
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)
        self.d = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        if self.by_data:
            x = x * int(torch.ones(len(x)).sum())  # a number that fx and torch.export cannot follow
        with torch.autocast("cpu", torch.bfloat16):
            x = self.b(F.relu(self.a(x)))
            x = self.c(x @ x.T @ x)
            with torch.autocast("cpu", enabled=False):
                y = self.d(x.float())
            return y + F.linear(x, self.d.weight).float()


@pytest.mark.parametrize(("by_data", "tracer"), [(False, "fx"), (True, "eager")])
def test_autocast_in_a_forward_does_not_hide_layers(by_data: bool, tracer: str) -> None:
    graph = check(Casts(by_data), (torch.randn(3, 4),), shorter=((torch.randn(2, 4),), {}))
    assert graph.tracer == tracer
    assert [layer.name for layer in graph.layers] == ["a", "b", "c", "d"]


class Matrices(nn.Module):
    """A perceptron of raw parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(4))
        self.biases = nn.ParameterList(torch.randn(4) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = F.dropout(torch.tanh(x @ weight + bias), 0.0)
        return x


class Cell(nn.Module):
    """A recurrent cell of raw parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ParameterDict({name: torch.randn(4, 4) / 4 for name in "iuo"})

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        i, u, o = (self.gates[name] for name in "iuo")
        return torch.sigmoid(x @ i) * torch.tanh(h @ u) + h @ o  # type: ignore[no-any-return]


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        h = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.head(h)


def test_layers_begin_where_code_reads_a_further_parameter() -> None:
    graph = check(Matrices(), (torch.randn(3, 4),))
    assert [layer.name for layer in graph.layers] == [f"weights.{i}" for i in range(4)]
    assert all(f"biases.{i}" in graph.tensors_of(layer) for i, layer in enumerate(graph.layers))
    graph = check(nn.Sequential(nn.Linear(4, 4), Matrices()), (torch.randn(3, 4),))
    assert [layer.name for layer in graph.layers] == ["0", "1", "1.weights.1", "1.weights.2", "1.weights.3"]


def test_a_cell_that_is_called_again_and_again_stays_whole() -> None:
    graph = check(Unrolled(), (torch.randn(3, 3, 4),))
    assert [layer.name for layer in graph.layers] == ["cell", "cell#2", "cell#3", "head"]


def test_torch_containers_show_their_layers() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
    graph = check(model, (torch.randn(3, 5, 8), torch.randn(3, 4, 8)))
    names = [layer.name for layer in graph.layers]
    assert names == [f"{part}.{n}" for part in ("encoder", "decoder") for n in ("layers.0", "layers.1", "norm")]


class Masked(nn.Module):
    """An encoder with a mask that it makes, and one for padding that it is given."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor) -> Any:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.encoder(x, mask=mask, src_key_padding_mask=padding)


def test_an_encoder_with_masks_shows_its_layers() -> None:
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    graph = check(Masked(), (torch.randn(3, 5, 8), padding))
    assert [layer.name for layer in graph.layers] == [f"encoder.layers.{i}" for i in range(3)]


@cache
def gpt2() -> tuple[Any, tuple[str, ...]]:
    """A small one, and the names of its layers."""
    from transformers import GPT2Config, GPT2LMHeadModel  # takes seconds, and others are collected without it

    sizes: Any = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 8}
    config = GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, bos_token_id=None, eos_token_id=None)
    plain = GPT2LMHeadModel(config)
    return plain, tuple(layer.name for layer in trace(plain, (torch.randint(0, 11, (3, 6)),)).layers)


@pytest.mark.parametrize("reentrant", [False, *in_long_run([True])])
def test_gradient_checkpointing_of_transformers_shows_the_blocks(reentrant: bool) -> None:
    plain, names = copy.deepcopy(gpt2())
    plain.activation_checkpointing_enable({"use_reentrant": reentrant})
    graph = check(plain, (torch.randint(0, 11, (3, 6)),), loss=lambda output: output.logits.pow(2).sum())
    assert tuple(layer.name for layer in graph.layers) == names
    assert len(names) > 10
    assert "gradient checkpointing" in graph.notes[0]
