"""Models traced on batches that are collated: free sizes of their own, and numbers read from tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcpipe.errors import DataError
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.graph.equivalence import check_batch_sizes


@dataclass(frozen=True)
class Ragged:
    """Samples of so many rows each, which are put into one tensor beside the number of each row's sample."""

    rows: tuple[int, ...] = (2, 5, 3, 1, 4, 7, 2)
    samples: int = 4

    def arguments(self, samples: int, offset: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        counts = torch.tensor([self.rows[(offset + i) % len(self.rows)] for i in range(samples)])
        owner = torch.arange(samples).repeat_interleave(counts)
        return (torch.sin(torch.arange(float(len(owner) * 4))).view(-1, 4), owner), {}


class Pooled(nn.Module):
    """A mean for each sample, whose number is read from the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def count(self, owner: Tensor) -> int:
        return int(owner.max()) + 1

    def forward(self, x: Tensor, owner: Tensor) -> Tensor:
        x = self.first(x)
        sums = torch.zeros(self.count(owner), 4).index_add(0, owner, x)
        output: Tensor = self.second(sums)
        return output


class Branching(Pooled):
    """Code that branches on what it has read."""

    def count(self, owner: Tensor) -> int:
        last = int(owner.max())
        return last + 1 if last < 40 else 40


def traced(model: nn.Module, batches: Ragged) -> LayerGraph:
    args, _ = batches.arguments(batches.samples, 0)
    return trace(model, args, collated=batches)


def test_a_number_that_is_read_from_a_tensor_is_computed_for_every_batch() -> None:
    model = Pooled()
    graph = traced(model, Ragged())
    assert (graph.tracer, len(graph.layers)) == ("fx", 2)
    assert graph.compared == {1, 2, 3, 4}
    assert graph.batched == ()
    args, _ = Ragged().arguments(4, 0)
    check_batch_sizes(graph, model, graph.signature.bind(args, {}), {4, 6}, collated=Ragged())
    assert "int" not in Pooled.count.__globals__


def test_code_that_branches_on_such_a_number_is_not_divided() -> None:
    graph = traced(Branching(), Ragged())
    assert len(graph.layers) == 1
    assert "runs whole" in graph.notes[0]


class Types(Pooled):
    """Code that asks for types, beside reading a number."""

    def count(self, owner: Tensor) -> int:
        assert isinstance(3, int)
        assert not isinstance(3.0, int)
        assert issubclass(bool, int)
        assert int("7") == 7
        assert float("1.5") == 1.5
        return int(owner.max()) + int.from_bytes(b"\x01", "big")


def test_types_stay_what_they_are_while_numbers_are_recorded() -> None:
    assert traced(Types(), Ragged()).tracer == "fx"


class Fixed(nn.Module):
    """Code for as many rows as there were."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, owner: Tensor) -> Tensor:
        return self.weight * (x.sum(0) if x.shape[0] == 5 else x.mean(0))


class Fives(Ragged):
    """Batches that always have five rows, at first."""

    def arguments(self, samples: int, offset: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        return Ragged(rows=(5,)).arguments(1, offset)


def test_a_size_that_never_changed_is_checked() -> None:
    model, other = Fixed(), Ragged(rows=(3, 4))
    graph = traced(model, Fives())
    with pytest.raises(DataError, match=r"micro-batches of 2, for which the layers of Fixed .* must have 5"):
        check_batch_sizes(graph, model, {}, {2}, collated=other)
