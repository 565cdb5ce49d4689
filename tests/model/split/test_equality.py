"""Stages, one after another, give what the plain module gives: outputs, gradients, buffers, random numbers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcpipe.model.graph import trace
from funcpipe.model.split import split
from funcpipe.training.plain_loop import seeded
from tests.model.graph.models import CausalTransformer, Encoder, ResidualNet
from tests.model.split.chain import assert_same, even_bounds, run_chain, take_gradients

SEED = (7, 3, 5)


def image() -> tuple[nn.Module, Tensor]:
    return ResidualNet(), torch.randn(4, 1, 8, 8)


def text() -> tuple[nn.Module, Tensor]:
    return CausalTransformer(), torch.randint(0, 23, (4, 12))


def rows() -> tuple[nn.Module, Tensor]:
    return Encoder(), torch.randn(4, 6, 5)


def square(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("make", [image, text, rows])
@pytest.mark.parametrize("stages", [1, 2, 3, 100])
def test_stages_equal_the_plain_module(make: Callable[[], tuple[nn.Module, Tensor]], stages: int) -> None:
    torch.manual_seed(0)
    model, x = make()
    plain = copy.deepcopy(model)
    graph = trace(model, (x,))
    pieces = split(graph, even_bounds(len(graph.layers), min(stages, len(graph.layers))))
    output = run_chain(pieces, graph.signature.bind((x,), {}), square, SEED)
    with seeded(plain, graph, *SEED):
        expected = plain(x)
    torch.autograd.backward(square(expected))
    assert torch.equal(output, expected)
    assert_same(take_gradients(model), take_gradients(plain), 0.0 if stages == 1 else 1e-6)
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("make", [image, text, rows])
def test_a_batch_may_be_shorter_than_the_sample(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    model, x = make()
    graph = trace(model, (x,))
    pieces = split(graph, even_bounds(len(graph.layers), 3))
    output = run_chain(pieces, graph.signature.bind((x[:3],), {}), square, SEED)
    with seeded(model, graph, *SEED):
        assert torch.equal(output, model(x[:3]))


def test_every_cut_of_a_residual_network_is_right() -> None:
    model, x = image()
    graph = trace(model, (x,))
    with seeded(model, graph, *SEED):
        expected = model(x)
    for cut in range(1, len(graph.layers)):
        pieces = split(graph, [(0, cut), (cut, len(graph.layers))])
        assert torch.equal(run_chain(pieces, {"x": x}, square, SEED), expected), graph.layers[cut].name


def test_random_numbers_differ_by_step_micro_batch_and_layer_only() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    x = torch.ones(64, 64)
    graph = trace(model, (x,))
    masks = set()
    for stages in (1, 2):
        pieces = split(graph, even_bounds(2, stages))
        for seed in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
            output = run_chain(pieces, graph.signature.bind((x,), {}), torch.sum, seed)
            masks.add((seed, tuple(output.flatten().tolist())))
    assert len(masks) == 4
    assert len({mask for _, mask in masks}) == 4


def test_tracing_leaves_model_and_generator_alone() -> None:
    model, x = image()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attributes = set(vars(model))
    model.eval()
    trace(model, (x,))
    assert_same(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(vars(model)) == attributes
    assert not any(module.training for module in model.modules())


def test_stages_hold_the_users_names_and_each_parameter_once() -> None:
    model, x = image()
    graph = trace(model, (x,))
    pieces = split(graph, even_bounds(len(graph.layers), 4))
    names = [name for piece in pieces for name in piece.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    assert sum(len(list(piece.parameters())) for piece in pieces) == len(list(model.parameters()))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, 6)  # T5's name for it, which must not clash with ours
        self.inner = nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.shared.weight

    def forward(self, x: Tensor) -> Any:
        return self.out(self.inner(self.shared(x)))


def test_parameters_tied_within_one_stage_stay_one() -> None:
    model, x = Tied(), torch.randint(0, 11, (3, 4))
    graph = trace(model, (x,))
    (piece,) = split(graph, [(0, 3)])
    assert dict(piece.shared) == {}
    assert len(list(piece.parameters())) == 3
    assert sorted(piece.state_dict()) == sorted(model.state_dict())
    run_chain([piece], {"x": x}, square)
    found = take_gradients(model)
    torch.autograd.backward(square(model(x)))
    assert_same(found, take_gradients(model))


def test_parameters_tied_across_stages_are_declared() -> None:
    model, x = Tied(), torch.randint(0, 11, (3, 4))
    first, last = split(trace(model, (x,)), [(0, 2), (2, 3)])
    assert first.shared == {"shared.weight": "shared.weight"}
    assert last.shared == {"out.weight": "shared.weight"}


def test_modules_kept_in_eval_mode_stay_so() -> None:
    model, x = ResidualNet(), torch.randn(4, 1, 8, 8)
    model.get_submodule("blocks.0.bn1").eval()
    graph = trace(model, (x,))
    (piece,) = split(graph, [(0, len(graph.layers))])
    piece.eval()
    piece.train()
    assert not piece.get_submodule("blocks.0.bn1").training
    assert piece.get_submodule("blocks.1.bn1").training
