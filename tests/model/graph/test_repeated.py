"""Few blocks of each kind are traced of a model without weights, and stand for the others only if that is right."""

import pytest
import torch
from torch import Tensor, nn

from funcpipe.model.graph import trace, tracing
from funcpipe.model.graph.repeated import RepeatedBlocks, repeated_blocks, shortened
from funcpipe.model.graph.values import LayerGraph
from funcpipe.model.weightless import Weightless
from tests.examples import in_long_run

SAMPLE = (torch.arange(12).view(2, 6),)


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = x + self.inner(self.norm(x) * mask)
        return result


class Model(nn.Module):
    """An encoder of blocks of one kind, and a decoder whose first block is another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.blocks = nn.ModuleList(Block(number) for number in range(14))
        self.others = nn.Sequential(nn.Linear(4, 4, bias=False), *(nn.Linear(4, 4) for _ in range(7)))
        self.head = nn.Linear(4, 12)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        mask = (x > 0).to(x.dtype)
        for number, block in enumerate(self.blocks):
            x = self.after(number, block(x, mask))
        result: Tensor = self.head(self.others(self.end(x)))
        return result

    def after(self, number: int, x: Tensor) -> Tensor:
        return x * 0.5

    def end(self, x: Tensor) -> Tensor:
        return x


class Other(Model):
    """One that does something else after a block that is left out."""

    def after(self, number: int, x: Tensor) -> Tensor:
        return x * 0.25 if number == 5 else x * 0.5


class Counting(Model):
    """One that asks how many blocks there are."""

    def end(self, x: Tensor) -> Tensor:
        return x / len(self.blocks)


class Skipping(Model):
    """One that keeps what all blocks have made."""

    kept: Tensor

    def after(self, number: int, x: Tensor) -> Tensor:
        self.kept = x if number == 0 else self.kept + x
        return x * 0.5

    def end(self, x: Tensor) -> Tensor:
        return x + self.kept


class Refusing(Model):
    """One that does not run with fewer blocks."""

    def end(self, x: Tensor) -> Tensor:
        if len(self.blocks) < 14:
            raise ValueError("blocks are missing")
        return x


class Counted(Weightless):  # type: ignore[no-untyped-call]
    """Counts operators."""

    count = 0

    def dispatch(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        self.count += 1
        return super().dispatch(func, types, args, kwargs)


def without_weights(kind: type[Model]) -> tuple[Model, Counted]:
    with torch.device("meta"):
        model = kind()
    mode = Counted()
    for path, module in model.named_modules():
        for name, tensor in module._parameters.items():
            module._parameters[name] = None if tensor is None else mode.empty(tensor, f"{path}.{name}")
    return model, mode


def facts(graph: LayerGraph) -> object:
    nodes = [
        (node.name, node.op, str(node.target), str(node.args), str(node.kwargs)) for node in graph.module.graph.nodes
    ]
    tensors = [{name: id(tensor) for name, tensor in graph.tensors_of(layer).items()} for layer in graph.layers]
    whole = graph.values, graph.outputs and str(graph.outputs), graph.state, graph.notes, graph.compared, graph.training
    return [layer.name for layer in graph.layers], nodes, tensors, whole, graph.signature.checks


def test_lists_that_end_in_many_blocks_of_one_kind_are_found() -> None:
    model = Model()
    assert repeated_blocks(model) == (RepeatedBlocks("blocks", 0, 14), RepeatedBlocks("others", 1, 8))
    with shortened(model, repeated_blocks(model)):
        assert [len(model.blocks), len(model.others)] == [3, 4]
    assert [len(model.blocks), len(model.others)] == [14, 8]
    model.blocks[10] = nn.Identity()
    assert repeated_blocks(model) == (RepeatedBlocks("others", 1, 8),)


@pytest.mark.parametrize("kind", [Model, Other, *in_long_run([Skipping, Counting, Refusing])])
def test_the_graph_is_that_of_all_blocks(kind: type[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model, mode = without_weights(kind)
    found = trace(model, SAMPLE)
    used, mode.count = mode.count, 0
    monkeypatch.setattr(tracing, "repeated_blocks", lambda model: ())
    expected = trace(model, SAMPLE)
    assert facts(found) == facts(expected)
    assert (used < mode.count) is (kind is Model)  # which alone can do with fewer
