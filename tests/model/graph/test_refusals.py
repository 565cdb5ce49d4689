"""Every refusal, and every note on what is not divided, names line, reason and way out; and the way out works."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.graph import trace
from tests.model.graph.check import check


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.generator = torch.Generator()
        self.runs = 0


class OwnGenerator(Base):
    def forward(self, x: Tensor) -> Any:
        noise = torch.rand(4, generator=self.generator)  # line: generator
        return self.b(self.a(x) + noise)


class GlobalGenerator(Base):
    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x) + torch.rand(4))


class Fails(Base):
    def forward(self, x: Tensor) -> Any:
        return self.a(x[:, :3])  # line: fails


class Succeeds(Base):
    def forward(self, x: Tensor) -> Any:
        return self.a(x[:, :4])


class Nothing(Base):
    def forward(self, x: Tensor) -> Any:
        return x


class ChangesParameter(Base):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)  # line: clamps
        return self.b(self.a(x))


class ChangesBuffer(Base):
    limit: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limit", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        self.limit.mul_(0.9)
        return self.b(self.a(x).clamp(max=self.limit))


class SparseBuffer(Base):
    matrix: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Any:  # line: sparse
        return self.b(torch.sparse.mm(self.matrix, self.a(x).t()).t())


class DenseBuffer(SparseBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = self.matrix.to_dense()

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.sparse.mm(self.matrix.to_sparse(), self.a(x).t()).t())


def line_of(mark: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'# line: {mark}'))}"


@pytest.mark.parametrize(
    ("refused", "fragments", "way_out"),
    [
        (OwnGenerator, ["gives different results", line_of("generator"), "use torch's global gen"], GlobalGenerator),
        (Fails, ["fails on the sample", line_of("fails"), "a (Linear)", "Call it with the sample"], Succeeds),
        (ChangesParameter, [line_of("clamps"), "parameter a.weight", "buffer (register_buffer)"], ChangesBuffer),
        (SparseBuffer, ["matrix, of SparseBuffer", line_of("sparse"), "neither saved nor sent"], DenseBuffer),
        (Nothing, ["Nothing computes nothing", "pass the module that holds the parameters"], Succeeds),
    ],
)
def test_refusals(refused: type[nn.Module], fragments: list[str], way_out: type[nn.Module]) -> None:
    model = refused()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError) as caught:
        trace(model, (torch.randn(3, 4),))
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert all(torch.equal(tensor.to_dense(), before[name].to_dense()) for name, tensor in model.state_dict().items())
    check(way_out(), (torch.randn(3, 4),))


def test_a_block_that_does_not_exist() -> None:
    with pytest.raises(ModelError, match=r"Succeeds has no module 'c' to make a block of; named_modules\(\) lists all"):
        trace(Succeeds(), (torch.randn(3, 4),), blocks=["c"])
    paths = [path for path, _ in Succeeds().named_modules()]
    assert [layer.name for layer in check(Succeeds(), (torch.randn(3, 4),), blocks=[paths[1]]).layers] == ["a"]


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x * 2 if bool(x.sum() > 0) else x  # line: decides


class DecidesItself(Base):
    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        x = x * 2 if bool(x.sum() > 0) else x  # line: decides itself
        return self.b(x)


class DecidesInside(Base):
    def __init__(self) -> None:
        super().__init__()
        self.decides = Decides()

    def forward(self, x: Tensor) -> Any:
        return self.b(self.decides(self.a(x)))


class WritesAcross(Base):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        view = y[:, :2]
        z = self.b(y * 1)
        view.mul_(2)
        return y.clone() + z


def test_a_model_that_cannot_be_divided_says_what_to_move_where() -> None:
    graph = check(DecidesItself(), (torch.randn(3, 4),), others=(-torch.ones(2, 4), 5 * torch.ones(1, 4)))
    (note,) = graph.notes
    assert note.startswith("DecidesItself runs whole, as one layer: DecidesItself, ")
    assert line_of("decides itself") in note
    assert "move the code of that line into a submodule" in note
    graph = check(DecidesInside(), (torch.randn(3, 4),), others=(-torch.ones(2, 4), 5 * torch.ones(1, 4)))
    assert [layer.name for layer in graph.layers] == ["a", "decides", "b"]
    assert line_of("decides") in graph.notes[0]


def test_a_model_of_one_layer_says_why() -> None:
    assert check(Succeeds(), (torch.randn(3, 4),)).notes == (
        "Succeeds is one layer: all it calls is a; layers begin at calls of modules, so move parts of its code into "
        "submodules to divide it",
    )
    graph = check(nn.Linear(4, 4), (torch.randn(3, 4),))
    assert graph.notes[0].startswith("Linear is one layer: it calls no modules and reads few parameters")
    (note,) = [note for note in check(WritesAcross(), (torch.randn(3, 4),)).notes if "one layer" in note]
    assert "write to the memory or the buffers of each other" in note
