"""The tracer of each model, the reasons why those before it failed, and models that none can trace."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from funcpipe.errors import DataError, ModelError
from funcpipe.model.graph import export_tracer, trace
from funcpipe.model.graph.equivalence import check_batch_sizes
from tests.model.graph.check import check


class Two(nn.Module):
    """Two linear layers; what happens between them is the subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        return self.b(self.between(self.a(x)))


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{Path(__file__)}:{next(i for i, line in enumerate(lines, 1) if text in line and 'line_of' not in line)}"


class LoopsOverShapes(Two):
    def between(self, x: Tensor) -> Tensor:
        assert x.dim() == 2 and x.shape[1] == 4  # noqa: PT018 - two questions in one condition
        if x.shape[0] > 0 and len(x.shape) == 2:
            x = x + sum(i * x.size(-1) for i in range(x.shape[-1]))
        return torch.stack([column * i for i, column in enumerate(x.unbind(1))], 1)


def test_code_may_loop_and_branch_on_shapes_under_fx() -> None:
    graph = check(LoopsOverShapes(), (torch.randn(3, 4),), shorter=((torch.randn(1, 4),), {}))
    assert graph.tracer == "fx"


class AsksForTensors(Two):
    def between(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError("a tensor is wanted")  # raised for what stands for one
        x = x * torch.arange(x.shape[0]).unsqueeze(1)
        x[:, 0] = 1.5
        return x


def test_what_fx_cannot_trace_is_exported() -> None:
    graph = check(AsksForTensors(), (torch.randn(3, 4),), shorter=((torch.randn(2, 4),), {}))
    assert [attempt.tracer for attempt in graph.attempts] == ["fx", "export"]
    assert line_of("# raised for what stands for one") in str(graph.attempts[0].failure)
    assert [layer.name for layer in graph.layers] == ["a", "b"]


def test_an_export_that_takes_too_long_is_given_up_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_tracer, "LIMIT_S", 0.0)
    with mock.patch.object(torch.export, "export", wraps=torch.export.export) as export:
        graph = check(AsksForTensors(), (torch.randn(3, 4),))
    assert export.call_count == 1
    assert [attempt.tracer for attempt in graph.attempts] == ["fx", "export", "eager"]
    assert "the export takes longer than 0 s of a processor" in str(graph.attempts[1].failure)


class SetsGradientsAndCasts(AsksForTensors):
    def between(self, x: Tensor) -> Tensor:
        x = super().between(x)
        with torch.no_grad():
            largest = x.abs().amax(1, keepdim=True)
            with torch.autocast("cpu", torch.bfloat16):
                product = x @ x.T
        with torch.autocast("cpu", torch.bfloat16):
            x = F.linear(x, self.b.weight)
        with torch.autocast("cpu", enabled=False):
            return x.float() / largest + product.float().mean(1, keepdim=True)


def test_parts_without_gradients_or_with_casts_are_exported_as_calls_that_note_it() -> None:
    graph = check(SetsGradientsAndCasts(), (torch.randn(3, 4),))
    assert graph.tracer == "export"
    nodes = [node for layer in graph.layers for node in layer.nodes]
    casts = (("cpu", torch.bfloat16),)
    scopes = [(node.meta.get("no_grad", False), node.meta.get("autocast", ())) for node in nodes]
    assert {(False, ()), (True, ()), (True, casts), (False, casts)} == set(scopes)
    assert not [node for node in nodes if isinstance(node.target, HigherOrderOperator)]


class CastsAll(AsksForTensors):
    """All layers under autocast, one of them in an island without."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.a(x)
            with torch.autocast("cpu", enabled=False):
                x = self.between(x.float())
            return self.b(x)


def test_autocast_around_layers_that_are_exported_does_not_hide_them() -> None:
    graph = check(CastsAll(), (torch.randn(3, 4),))
    assert graph.tracer == "export"
    assert [layer.name for layer in graph.layers] == ["a", "b"]


class EachSample(Two):
    def between(self, x: Tensor) -> Tensor:
        targets = torch.arange(len(x))  # a length that Python must know
        return x * targets.unsqueeze(1) / len(x)


def test_what_cannot_be_exported_is_recorded() -> None:
    graph = check(EachSample(), (torch.randn(3, 4),), shorter=((torch.randn(2, 4),), {}))
    assert [attempt.tracer for attempt in graph.attempts] == ["fx", "export", "eager"]
    assert line_of("# a length that Python must know") in str(graph.attempts[0].failure)
    assert [layer.name for layer in graph.layers] == ["a", "b"]


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Linear(4, 4)
        self.many = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        if x.sum() > 0:  # a choice by the data
            return self.few(x)
        return self.many(x)


class HoldsChooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), Chooses(), Chooses(), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Any:
        for part in self.parts:
            x = part(x)
        return x


def test_a_module_that_decides_by_the_data_is_one_block() -> None:
    graph = check(HoldsChooses(), (torch.randn(3, 4),), shorter=((-torch.ones(2, 4),), {}))
    assert [layer.name for layer in graph.layers] == ["parts.0", "parts.1", "parts.2", "parts.3"]
    (note,) = graph.notes
    assert "parts.1, parts.2" in note
    assert line_of("# a choice by the data") in note


def test_blocks_that_the_user_declares_are_not_looked_into() -> None:
    graph = check(HoldsChooses(), (torch.randn(3, 4),), blocks=("parts.1", "parts.2"))
    assert graph.tracer == "fx"
    assert graph.notes == ()
    with pytest.raises(ModelError, match=r"HoldsChooses has no module 'parts.9'"):
        trace(HoldsChooses(), (torch.randn(3, 4),), blocks=("parts.9",))


def test_a_model_that_decides_by_the_data_itself_runs_whole_and_says_why_and_what_would_help() -> None:
    graph = check(Chooses(), (torch.randn(3, 4),), others=(-torch.ones(2, 4), torch.ones(1, 4)))
    assert [layer.name for layer in graph.layers] == ["Chooses"]
    (note,) = graph.notes
    assert note.startswith("Chooses runs whole, as one layer: Chooses, ")
    assert line_of("# a choice by the data") in note
    assert "`if x.sum() > 0:  # a choice by the data`" in note
    assert "reads a tensor whose contents depend on the data" in note
    assert "move the code of that line into a submodule" in note


class OwnGenerator(Two):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def between(self, x: Tensor) -> Tensor:
        return x + torch.rand(4, generator=self.generator)


def test_a_generator_of_its_own_is_refused() -> None:
    with pytest.raises(ModelError, match="gives different results for the same inputs and seeds"):
        trace(OwnGenerator(), (torch.randn(3, 4),))


class Counts(Two):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_a_buffer_that_changes_is_carried_from_one_forward_to_the_next() -> None:
    assert trace(Counts(), (torch.randn(3, 4),)).carried.buffers == ("calls",)


class StraightThrough(torch.autograd.Function):
    """Rounds forward; backward as if it had not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return StraightThrough.apply(x)  # type: ignore[no-untyped-call]


def test_a_gradient_of_the_users_own_is_kept() -> None:
    graph = check(nn.Sequential(nn.Linear(4, 4), Rounded(), nn.Linear(4, 4)), (torch.randn(3, 4),))
    assert [layer.name for layer in graph.layers] == ["0", "1", "2"]


class Halves(Two):
    def between(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2)
        return torch.cat([left * right, left - right])  # takes an even batch only


def test_a_model_may_refuse_batch_sizes() -> None:
    graph = check(Halves(), (torch.randn(6, 4),), shorter=((torch.randn(4, 4),), {}))
    assert [layer.name for layer in graph.layers] == ["a", "b"]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.randn(3, 5),), {}, r"the model fails on the sample. a \(Linear\), .*: RuntimeError: mat1 and mat2"),
        ((torch.randn(3, 4), 1), {}, "LoopsOverShapes cannot be called with the sample: too many positional"),
        ((), {"y": torch.randn(3, 4)}, "missing a required argument: 'x'"),
        ((3,), {}, "the sample for LoopsOverShapes contains no tensor"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        trace(LoopsOverShapes(), args, kwargs)


def test_inputs_unlike_the_sample_are_refused() -> None:
    class Flags(nn.Module):
        def forward(self, x: Tensor, flag: bool = False, extra: Tensor | None = None) -> Any:
            return F.relu(x) if flag else x * 2

    signature = trace(Flags(), (torch.randn(3, 4),), {"flag": True}).signature
    x = torch.randn(2, 4)
    assert signature.bind((x, True), {})["x"] is x
    assert signature.arguments({"x": x}) == ((x, True), {})
    for args, kwargs, message in [
        ((x,), {}, "traced with inputs.x, inputs.flag, but got inputs.x"),
        ((x,), {"flag": False}, "the input flag was True when the model was traced, but is False now"),
        ((3,), {"flag": True}, "the input x must be a tensor, got int"),
        ((x, True, x), {}, "but got inputs.x, inputs.flag, inputs.extra"),
        ((), {"flag": True}, "missing a required argument"),
    ]:
        with pytest.raises(DataError, match=re.escape(message)):
            signature.bind(args, kwargs)


class AsksBeforeItLooks(Two):
    def between(self, x: Tensor) -> Tensor:
        return x if not torch.compiler.is_exporting() and bool((x > 1e9).all()) else x * 2


class DiffersForOneSample(Two):
    def between(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 1 and not torch.compiler.is_exporting() else 2 * x


class DoublesOneSample(Two):
    def between(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 1 else x


@pytest.mark.parametrize(("blocks", "tracer"), [((), "export"), (("a",), "eager")])
@pytest.mark.parametrize("kind", [AsksBeforeItLooks, DiffersForOneSample])
def test_code_that_asks_whether_it_is_exported_gets_a_yes_before_it_runs_whole(
    kind: type[Two], blocks: tuple[str, ...], tracer: str
) -> None:
    graph = check(kind(), (torch.randn(4, 4),), shorter=((torch.randn(1, 4),), {}), blocks=blocks)
    assert (graph.tracer, [layer.name for layer in graph.layers]) == (tracer, ["a", "b"])


def test_a_graph_that_refuses_single_samples_is_better_than_none_and_says_so() -> None:
    model = DoublesOneSample()
    graph = check(model, (torch.randn(4, 4),), shorter=((torch.randn(3, 4),), {}))
    assert (graph.tracer, len(graph.layers)) == ("fx", 2)
    inputs = graph.signature.bind((torch.randn(4, 4),), {})
    with pytest.raises(DataError, match=r"`return x \* 2 if x.shape\[0\] == 1 else x` was traced for False"):
        check_batch_sizes(graph, model, inputs, {4, 1})
