"""Sparse tensors can be neither saved nor sent: where they are made, read and kept in a model."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.model.graph.check import check


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)


class MadeInForward(Base):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        swap = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (4, 4))
        return self.b(torch.sparse.mm(swap, y.t()).t())


class ReadByALaterLayer(Base):
    def forward(self, x: Tensor) -> Any:
        y = self.a(x).to_sparse()
        z = self.b(x)
        return self.c(torch.sparse.mm(y, z.t() @ z))


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.eye(4).to_sparse()

    def forward(self, x: Tensor) -> Any:
        return torch.sparse.mm(self.matrix, x.t()).t()


class HoldsConstant(Base):
    def __init__(self) -> None:
        super().__init__()
        self.constant = Constant()

    def forward(self, x: Tensor) -> Any:
        return self.b(self.constant(self.a(x)))


def test_one_that_a_forward_makes_of_constants_is_made_by_the_stage() -> None:
    graph = check(MadeInForward(), (torch.randn(3, 4),))
    assert (graph.tracer, [layer.name for layer in graph.layers]) == ("eager", ["a", "b"])


def test_no_cut_lies_between_one_and_its_readers() -> None:
    graph = check(ReadByALaterLayer(), (torch.randn(3, 4),))
    assert [layer.name for layer in graph.layers] == ["a", "c"]


def test_one_that_a_module_holds_makes_it_a_block() -> None:
    graph = check(HoldsConstant(), (torch.randn(3, 4),))
    assert [layer.name for layer in graph.layers] == ["a", "constant", "b"]
    (note,) = graph.notes
    assert note.startswith("kept as one block each: constant: constant (Constant), ")
    assert "reads a sparse or quantised tensor" in note
