"""Of equal layers without weights one is run: profiles are those of every layer run, however alike layers are."""

import importlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcpipe.core import LayerReport, ModelProfile
from funcpipe.core.accelerator import Accelerator, Work
from funcpipe.model.graph import trace
from funcpipe.model.graph.values import LayerGraph
from funcpipe.model.split import StageModule
from funcpipe.model.weightless import Weightless
from funcpipe.platforms.catalog import load_spec
from funcpipe.profiler import estimate
from funcpipe.profiler.equal_layers import LayerRuns
from funcpipe.profiler.measure import LayerRun, Timing, run_layer
from funcpipe.profiler.profile import profile

MODULE = importlib.import_module("funcpipe.profiler.profile")
DEVICE = Accelerator.measured("x", flop_s=1e9, bytes_s=1e12, memory_mb=1)
B, T, W = 2, 3, 4


class Block(nn.Module):
    """Layers of several ways to send tensors on: as they are, as views of what was given, several in one storage."""

    def __init__(self, width: int = W, *, frozen: bool = False) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 2 * width).requires_grad_(not frozen)
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k = self.wide(x).chunk(2, -1)
        x = x + self.two(self.one(q).transpose(1, 2).transpose(1, 2) * k * mask)
        result: Tensor = self.norm(x)
        return result


class Chain(nn.Module):
    """Blocks one after the other, with what is `between` them, by number; `masks` may be two, in turn."""

    def __init__(
        self, blocks: list[nn.Module], between: Mapping[int, Callable[[Tensor], Tensor]] = {}, *, masks: int = 1
    ) -> None:
        super().__init__()
        self.masks = masks
        self.first = nn.Linear(W, W)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(W, 2)
        self.between = dict(between)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x.sum(-1, keepdim=True) > 0).to(x.dtype)
        masks = [mask, 1 - mask][: self.masks]
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x, masks[number % len(masks)])
            if number in self.between:
                x = self.between[number](x)
        result: Tensor = self.last(x)
        return result


class Pair(nn.Module):
    """Two products, whose matrices may be one."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(W)
        self.one = nn.Parameter(torch.empty(W, W))
        self.two = self.one if tied else nn.Parameter(torch.empty(W, W))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.norm(x) @ self.one @ self.two
        return result


class Joined(nn.Module):
    """A layer that is given two tensors, which may lie in one storage."""

    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(W, W), nn.Linear(W, W)
        self.view = view

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.inner(x)
        y = x.view(x.shape) if self.view else x * 2
        result: Tensor = self.outer(x) * y * x
        return result


def second_of_two(x: Tensor) -> Tensor:
    """What is equal to `x`, in a storage of twice the size."""
    return torch.stack([x, x])[1]


def adapted() -> Block:
    block = Block()
    block.two = nn.Sequential(nn.Linear(W, 1, bias=False), nn.Linear(1, W, bias=False))  # type: ignore[assignment]
    return block


def tied() -> list[nn.Module]:
    blocks = [Block() for _ in range(4)]
    blocks[2].two.weight = blocks[1].one.weight
    return [*blocks]


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "all alike": (lambda: Chain([Block() for _ in range(3)]), 6),
    "some frozen": (lambda: Chain([Block(frozen=i % 2 == 0) for i in range(4)]), 7),
    "some adapted": (lambda: Chain([Block(), adapted(), Block(), adapted()]), 8),
    "tied across layers": (lambda: Chain(tied()), 6),
    "tied within layers": (lambda: Chain([Pair(tied=i % 2 == 0) for i in range(4)]), 4),
    "views of what is given": (lambda: Chain([Joined(view=i % 2 == 0) for i in range(4)]), 6),
    "other contents": (lambda: Chain([Block() for _ in range(4)], masks=2), 7),
    "larger storages": (lambda: Chain([Block() for _ in range(4)], {1: second_of_two}), 9),
}
"""Models, and the number of their layers that are not equal to an earlier one."""


def without_weights(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = make()
    mode, made = Weightless(), dict[int, Tensor]()
    for path, module in model.named_modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and id(tensor) not in made:
                made[id(tensor)] = mode.empty(tensor, f"{path}.{name}")
            module._parameters[name] = None if tensor is None else made[id(tensor)]
    return model


X = torch.randn(B, T, W, generator=torch.Generator().manual_seed(1))


def profiled(graph: LayerGraph, **options: Any) -> ModelProfile:
    options = {"repeats": 0, **options}
    return profile(graph, (X,), spec=load_spec("aws-lambda"), micro_batch=B, **options)


@pytest.fixture
def run_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the layers that are run."""
    names: list[str] = []

    def counted(stage: StageModule, values: Mapping[str, Tensor], loss: object = None) -> LayerRun:
        names.append(stage.program.layers[0].name)
        return run_layer(stage, values)

    monkeypatch.setattr(MODULE, "run_layer", counted)
    monkeypatch.setattr(estimate, "processor", lambda dtype: DEVICE)
    return names


def all_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no layer be equal to another."""
    numbers = itertools.count()
    monkeypatch.setattr(MODULE, "layer_fingerprint", lambda *_: str(next(numbers)))


@pytest.mark.parametrize("name", MODELS)
def test_a_profile_is_that_of_every_layer(name: str, run_names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make, kinds = MODELS[name]
    graph = trace(without_weights(make), (X,))
    found, runs = profiled(graph), len(run_names)
    run_names.clear()
    all_differ(monkeypatch)
    expected = profiled(graph)
    assert len(run_names) == len(expected.layers) > runs
    assert replace(found, timed_as={}) == expected
    assert runs == kinds


def test_layers_with_weights_are_all_run(run_names: list[str]) -> None:
    found = profiled(trace(Chain([Block() for _ in range(3)]), (X,)))
    assert run_names == [layer.name for layer in found.layers]
    assert len(found.timed_as) == 8  # the layers of the second and of the third block


def test_as_many_layers_are_timed_however_many_are_run(run_names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace(without_weights(lambda: Chain([Block(frozen=i == 2) for i in range(4)])), (X,))
    timed: list[str] = []
    sizes = len(load_spec("aws-lambda").sizes)

    def measure(stage: StageModule, values: Mapping[str, Tensor], loss: object, repeats: int) -> Timing:
        timed.append(stage.program.layers[0].name)
        seconds, work = (float(len(timed)),), Work(flop=len(timed), dense_bytes=1, other_bytes=2)
        report = LayerReport(
            forward_s=seconds, backward_s=seconds, workspace_bytes=3, forward_work=work, backward_work=work
        )
        return lambda: [report] * sizes

    found = profiled(graph, repeats=1, on=measure)
    assert (len(timed), len(run_names)) == (7, 7)
    first = list(timed)
    timed.clear()
    run_names.clear()
    monkeypatch.setattr(LayerRuns, "of", lambda self, stage, values, kind: self._run(stage, values))
    assert profiled(graph, repeats=1, on=measure) == found
    assert timed == first
    assert len(run_names) == len(found.layers)
