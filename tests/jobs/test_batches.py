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
from funcpipe.client.prepare.evaluation import make_evaluation
from funcpipe.client.prepare.job import Learner, SampleOrder, make_job
from funcpipe.core import Plan, RunSettings, ScheduleKind, Sync, Validation, Wire
from funcpipe.errors import DataError
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.recipe import Recipe
from tests.client.validated import run
from tests.examples import in_long_run
from tests.jobs.scripts import EQUAL, Script, run_over_functions, run_script, worst_difference
from tests.support.plans import even_stages

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


@pytest.mark.parametrize(("stages", "replicas"), [(3, 2), *in_long_run([(2, 1)])])
@pytest.mark.parametrize("kind", SCRIPTS)
def test_batches_are_collated_and_never_cut(kind: str, stages: int, replicas: int) -> None:
    script = SCRIPTS[kind]
    found = run_over_functions(script, stages=stages, replicas=replicas)
    difference, name = worst_difference(script, found, run_script(script)[0])
    assert difference < EQUAL, name


@pytest.mark.parametrize("schedule", [ScheduleKind.ONE_F_ONE_B])
def test_other_schedules_and_recomputation_take_such_batches(schedule: ScheduleKind) -> None:
    found = run_over_functions(GRAPHS, stages=2, schedule=schedule, recompute=True)
    difference, name = worst_difference(GRAPHS, found, run_script(GRAPHS)[0])
    assert difference < EQUAL, name


def pipe_of(script: Script) -> FuncPipe:
    model, loss = script.made()
    return FuncPipe(model, loss_fn=loss, optimizer=script.optimizer)


def loader_of(script: Script) -> DataLoader[Any]:
    return DataLoader(script.samples(), batch_size=script.micro_batch, collate_fn=script.collate)


def test_a_profile_from_the_loader_is_of_its_largest_micro_batch() -> None:
    rows = graphs()
    largest = [(torch.zeros(60, 8), torch.zeros(2, 9, dtype=torch.int64), torch.tensor(0))]
    script = replace(GRAPHS, samples=lambda: [*rows, *largest])
    found = pipe_of(script).profile(loader_of(script), platform="local", micro_batch=4, repeats=1)
    assert [layer.name for layer in found.layers] == [*(f"convs.{i}" for i in range(4)), "head"]
    nodes = sum(len(x) for x, _, _ in rows[-3:]) + 60
    assert found.layers[0].input_bytes >= nodes * 8 * 4
    sent = [max(t.forward_bytes for t in found.tensors if t.producer == layer) for layer in range(4)]
    assert sent == [nodes * 8 * 4] * 3 + [4 * 8 * 4]  # states of nodes, and then a row for each graph


@pytest.mark.parametrize("kind", SCRIPTS)
def test_tensors_that_do_not_tell_their_samples_are_refused_by_profile(kind: str) -> None:
    script = SCRIPTS[kind]
    *inputs, target = next(iter(loader_of(script)))
    with pytest.raises(DataError, match="give profile the DataLoader as sample_inputs"):
        pipe_of(script).profile(tuple(inputs), platform="local", micro_batch=3, sample_target=target, repeats=1)
    profiled = pipe_of(script).profile(loader_of(script), platform="local", micro_batch=3, repeats=1)
    assert profiled.micro_batch == 3


def test_sequences_sorted_by_the_collate_function_have_no_order_to_send() -> None:
    script = replace(PACKED, collate=partial(packed, enforce_sorted=True))
    found = run_over_functions(script, stages=3)
    difference, name = worst_difference(script, found, run_script(script)[0])
    assert difference < EQUAL, name


class Counted(Graphs):
    """The number of graphs is an input."""

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, count: Any) -> Tensor:  # type: ignore[override]
        for conv in self.convs:
            x = x + torch.zeros_like(x).index_add(0, edges[1], conv(x)[edges[0]]).tanh()
        output: Tensor = self.head(torch.zeros(int(count), 8).index_add(0, graph, x))
        return output


def counted(samples: list[Any], *, as_tensor: bool) -> tuple[Any, ...]:
    *inputs, targets = one_graph(samples)
    return *inputs, torch.tensor(len(samples)) if as_tensor else len(samples), targets


def test_a_number_that_changes_is_to_be_a_tensor() -> None:
    numbers = script_of(Counted, graphs, partial(counted, as_tensor=False))
    with pytest.raises(DataError, match="the input count was 4 when the model was traced, but is 2 now; give what"):
        run_over_functions(numbers)
    tensors = script_of(Counted, graphs, partial(counted, as_tensor=True))
    difference, name = worst_difference(tensors, run_over_functions(tensors), run_script(tensors)[0])
    assert difference < EQUAL, name


def test_lists_with_a_tensor_for_each_sample_need_micro_batches_of_one_size() -> None:
    uneven = script_of(Ragged, sequences, ragged)
    with pytest.raises(DataError, match=r"micro-batches of 2, .*rows.3, but got inputs.rows.0, inputs.rows.1; give"):
        run_over_functions(uneven)
    even = replace(uneven, samples=lambda: sequences(48))
    difference, name = worst_difference(even, run_over_functions(even, stages=3), run_script(even)[0])
    assert difference < EQUAL, name


class Nested(nn.Module):
    """Linear layers over a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.first(x).relu().to_padded_tensor(0.0).sum(1))
        return output


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    def nested(samples: list[Any]) -> tuple[Tensor, ...]:
        rows, targets = zip(*samples, strict=True)
        return torch.nested.nested_tensor(list(rows), layout=layout), torch.stack(targets)

    with pytest.raises(DataError, match=r"the input x is a nested tensor .* give a PackedSequence"):
        run_over_functions(script_of(Nested, sequences, nested))


def hits(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).double().mean()


def test_validation_is_weighted_by_graphs_as_over_one_batch_of_all() -> None:
    model, loss = GRAPHS.made()
    data = loader_of(GRAPHS)
    plan = Plan(
        global_batch=16,
        micro_batch=4,
        replicas=2,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        platform="local",
        stages=even_stages([*(f"convs.{i}" for i in range(4)), "head"], 2),
    )
    evaluation = make_evaluation(model, data, plan, loss=loss, metrics={"hits": hits}, blocks=())
    made = make_job(
        Learner(model=model, recipe=Recipe(loss=loss, optimizer=GRAPHS.optimizer)),
        data,
        plan,
        SampleOrder(shuffle=False),
        RunSettings(),
        Validation(data=data, metrics={"hits": hits}),
    )
    assert evaluation.graph.compared == made.graph.compared == {1, 2, 3, 4}
    storage = MemoryStorage()
    result = run(made, storage, ThreadPlatform(load_spec("local"), storage))
    trained = run_script(GRAPHS)[0].eval()
    *inputs, target = one_graph(graphs())
    with torch.no_grad():
        output = trained(*inputs)
    values = result.validations[-1].values
    assert values["val_loss"] == pytest.approx(loss(output, target).item(), rel=1e-5)
    assert values["hits"] == pytest.approx(hits(output, target).item())
