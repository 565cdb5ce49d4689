"""A layer graph as networkx sees it."""

from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn

from funcpipe.model.graph import trace


class Skip(nn.Module):
    """A chain of which the third layer also reads the first; the last shares its weight with the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4, bias=False) for _ in range(4))
        self.d.weight = self.b.weight

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        first = self.a(x)
        return self.d((self.c(self.b(first)) + first) * scale)


def test_layers_are_nodes_and_values_are_edges() -> None:
    graph = trace(Skip(), (torch.randn(2, 4), torch.randn(2, 4)))
    found = graph.to_networkx()
    assert found.name == "Skip"
    assert dict(found.nodes(data="index")) == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert dict(found.nodes(data="inputs")) == {"a": ("x",), "b": (), "c": ("scale",), "d": ()}
    assert dict(found.nodes(data="parameter_bytes")) == dict.fromkeys("abcd", 64)
    ends = {(producer, consumer) for producer, consumer, _ in found.edges(keys=True)}
    assert ends == {("a", "b"), ("a", "c"), ("b", "c"), ("c", "d")}
    for _, _, name, value in found.edges(keys=True, data=True):
        assert value == {"bytes": 2 * 4 * 4, "differentiable": True}, name


def test_values_that_cross_a_cut_are_the_edges_across_it() -> None:
    graph = trace(Skip(), (torch.randn(2, 4), torch.randn(2, 4)))
    found = graph.to_networkx()
    assert nx.is_directed_acyclic_graph(found)
    assert list(nx.topological_sort(found)) == [layer.name for layer in graph.layers]
    for cut in range(1, len(graph.layers)):
        before = {layer.name for layer in graph.layers[:cut]}
        assert {name for _, _, name in nx.edge_boundary(found, before, keys=True)} == {
            value.name for value in graph.crossing(cut)
        }
