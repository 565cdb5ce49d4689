"""Batches whose first dimension is not the batch: graphs in one tensor, packed sequences, time before the batch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import DataLoader

from funcpipe import FuncPipe
from funcpipe.core import ScheduleKind
from funcpipe.errors import DataError
from tests.jobs.scripts import EQUAL, SGD, Script, run_over_functions, run_script, worst_difference

SAMPLES = 46  # two global batches of 16 and one of 14, whose last micro-batch has 2 samples


class Graphs(nn.Module):
    """Nodes of all graphs of a batch in one tensor, edges, and the number of each node's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + torch.zeros_like(x).index_add(0, edges[1], conv(x)[edges[0]]).tanh()
        pooled = torch.zeros(int(graph.max()) + 1, 8).index_add(0, graph, x)
        output: Tensor = self.head(pooled)
        return output


def graphs(samples: int = SAMPLES) -> list[Any]:
    generator, rows = torch.Generator().manual_seed(3), []
    for i in range(samples):
        nodes, count = 3 + i % 4, 2 + i * i % 7
        edges = torch.randint(0, nodes, (2, count), generator=generator)
        rows.append((torch.randn(nodes, 8, generator=generator), edges, torch.tensor(i % 3)))
    return rows


def one_graph(samples: list[Any]) -> tuple[Tensor, ...]:
    counts = torch.tensor([len(x) for x, _, _ in samples])
    first = counts.cumsum(0) - counts
    nodes, edges, targets = zip(*samples, strict=True)
    pairs = [some + start for some, start in zip(edges, first, strict=True)]
    numbers = torch.arange(len(samples)).repeat_interleave(counts)
    return torch.cat(nodes), torch.cat(pairs, 1), numbers, torch.stack(targets)


class Recurrent(nn.Module):
    """Two recurrent layers over packed sequences; the last state of each sequence is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(6, 8), nn.GRU(8, 8)
        self.between, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: PackedSequence) -> Tensor:
        steps, _ = self.first(x)
        _, state = self.second(steps)
        output: Tensor = self.head(self.between(state[-1]).relu())
        return output


def sequences(samples: int = SAMPLES, features: int = 6) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    lengths = [2 + i * i % 5 + i % 3 for i in range(samples)]
    return [(torch.randn(n, features, generator=generator), torch.tensor(i % 3)) for i, n in enumerate(lengths)]


def packed(samples: list[Any], *, enforce_sorted: bool = False) -> tuple[Any, Tensor]:
    if enforce_sorted:
        samples = sorted(samples, key=lambda sample: -len(sample[0]))
    rows, targets = zip(*samples, strict=True)
    return pack_sequence(list(rows), enforce_sorted=enforce_sorted), torch.stack(targets)


class TimeFirst(nn.Module):
    """Padded sequences whose first dimension is time; the mean over the time of each is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(6, 8), nn.GRU(8, 8)
        self.between, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        inside = (torch.arange(x.shape[0])[:, None] < lengths).unsqueeze(-1)
        x = self.between(self.first(x)[0]).relu()
        steps = self.second(x)[0] * inside
        output: Tensor = self.head(steps.sum(0) / lengths[:, None])
        return output


def time_first(samples: list[Any]) -> tuple[Tensor, ...]:
    rows, targets = zip(*samples, strict=True)
    return pad_sequence(list(rows)), torch.tensor([len(row) for row in rows]), torch.stack(targets)


class Ragged(nn.Module):
    """A list with one tensor for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, rows: list[Tensor]) -> Tensor:
        means = [self.second(self.first(row).relu()).mean(0) for row in rows]
        output: Tensor = self.head(torch.stack(means))
        return output


def ragged(samples: list[Any]) -> tuple[Any, ...]:
    rows, targets = zip(*samples, strict=True)
    return list(rows), torch.stack(targets)


def script_of(model: type[nn.Module], samples: Callable[[], Any], collate: Callable[[list[Any]], Any]) -> Script:
    return Script(make=lambda: (model(), F.cross_entropy), samples=samples, collate=collate)


GRAPHS = script_of(Graphs, graphs, one_graph)
PACKED = script_of(Recurrent, sequences, packed)
TIME_FIRST = script_of(TimeFirst, sequences, time_first)
SCRIPTS = {"graphs": GRAPHS, "packed": PACKED, "time first": TIME_FIRST}


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("kind", SCRIPTS)
def test_batches_are_collated_and_never_cut(kind: str, stages: int, replicas: int) -> None:
    script = SCRIPTS[kind]
    found = run_over_functions(script, stages=stages, replicas=replicas)
    difference, name = worst_difference(script, found, run_script(script)[0])
    assert difference < EQUAL, name
