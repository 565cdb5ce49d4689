"""A function's loader: micro-batches in order, ahead, from anywhere; only what the stage needs is kept."""

from typing import Any, cast

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from funcpipe.errors import DataError
from funcpipe.model.graph import trace
from funcpipe.model.split import split
from funcpipe.training.batches import Batches
from funcpipe.training.carried import RunningStatistics
from funcpipe.training.data import load_batch
from funcpipe.training.data_source import LoaderOptions
from funcpipe.training.loading import Loader, Order, SeededDataset, batch_selector
from funcpipe.training.passes import Batch

BATCHES = Batches(samples=10, global_batch=6, micro_batch=2, seed=0)


class Counting(Dataset[Any]):
    """Samples that draw; notes which were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return BATCHES.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.asked.append(index)
        return torch.rand(3), torch.tensor(index)


def loader(dataset: Counting, replica: int = 0, workers: int = 0) -> Loader:
    return Loader(
        cast(Any, dataset),
        LoaderOptions(workers=workers),
        Order(BATCHES, epochs=2, replica=replica, replicas=2),
        seed=3,
        keep=lambda loaded: ({"x": loaded.args[0]}, loaded.target),
    )


def expected(step: int, micro_batch: int) -> Batch:
    found = next(BATCHES.steps_from(step, 2))
    loaded = SeededDataset(cast(Any, Counting()), 3, found.epoch).batch(found.micro_batches[micro_batch])
    return {"x": loaded.args[0]}, loaded.target


def check(found: Batch, step: int, micro_batch: int) -> None:
    inputs, target = expected(step, micro_batch)
    assert torch.equal(found[0]["x"], inputs["x"])
    assert torch.equal(found[1], target)


def test_a_replica_loads_its_own_micro_batches_in_order_over_steps_and_epochs() -> None:
    dataset = Counting()
    with loader(dataset) as mine:
        for step, micro_batch in [(0, 0), (0, 2), (1, 0), (2, 0), (2, 2)]:
            assert mine.load(step, micro_batch) is None
            check(mine.take(step, micro_batch), step, micro_batch)
        assert len(dataset.asked) == 10, "nothing is loaded that was not asked for, and nothing twice"


def test_a_step_that_is_repeated_is_loaded_again_with_the_same_samples() -> None:
    with loader(Counting(), replica=1) as mine:
        mine.load(2, 1)
        mine.load(3, 1)
        assert mine.begin_step(3)
        assert not mine.begin_step(0)
        mine.load(0, 1)
        check(mine.take(0, 1), 0, 1)
        with pytest.raises(KeyError):
            mine.take(2, 1)


def test_processes_load_the_same_and_tell_when() -> None:
    with loader(Counting(), workers=2) as mine:
        before_s = 0.0
        for step, micro_batch in [(0, 0), (0, 2), (1, 0)]:
            ago_s = mine.load(step, micro_batch)
            assert ago_s is not None
            assert ago_s[0] >= ago_s[1] >= before_s
            check(mine.take(step, micro_batch), step, micro_batch)


def test_stages_keep_what_they_read_and_the_last_one_the_target() -> None:
    graph = trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)), (torch.zeros(2, 3),))
    first, last = split(graph, [(0, 2), (2, 3)])
    loaded = load_batch([(torch.ones(3), i) for i in range(4)], [1, 3])
    inputs, target = batch_selector(first, graph.signature)(loaded)
    assert [tensor.shape for tensor in inputs.values()] == [(2, 3)]
    assert target is None
    inputs, target = batch_selector(last, graph.signature)(loaded)
    assert inputs == {}
    assert target.tolist() == [1, 3]


def test_processes_that_load_are_sent_nothing_of_their_stage() -> None:
    graph = trace(nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512)), (torch.zeros(2, 512),))
    (stage,) = split(graph, [(0, len(graph.layers))])
    assert stage.statistics
    statistics = RunningStatistics(stage, stage.statistics)  # whose hook cannot be pickled
    sent = cloudpickle.dumps(batch_selector(stage, graph.signature))
    assert len(sent) < 2_000 < 512 * 512
    loaded = load_batch([(torch.ones(512), i) for i in range(2)], [0, 1])
    assert torch.equal(cloudpickle.loads(sent)(loaded)[0]["input"], torch.ones(2, 512))
    assert statistics.contributions()


def test_samples_of_different_lengths_need_a_collate_function() -> None:
    ragged = [(torch.ones(length), 0) for length in (3, 5)]
    message = r"samples 0, 1 of the dataset cannot be put into one batch: tensors 0 have the shapes \(3,\), \(5,\) in"
    with pytest.raises(DataError, match=message):
        load_batch(ragged, [0, 1])
    padded = load_batch(ragged, [0, 1], lambda samples: (torch.zeros(len(samples), 5), torch.zeros(len(samples))))
    assert padded.args[0].shape == (2, 5)
    with pytest.raises(DataError, match="the collate_fn returns a int"):
        load_batch(ragged, [0, 1], lambda samples: 3)


def test_loading_goes_on_within_a_step() -> None:
    batches = Batches(samples=20, global_batch=8, micro_batch=2, seed=0)
    for replica in range(2):
        order = Order(batches, epochs=2, replica=replica, replicas=2)
        every = [*order.starting_at(0, 0)]
        assert [(request.step, request.micro_batch) for request in every[:3]] == [
            (0, replica),
            (0, replica + 2),
            (1, replica),
        ]
        assert [*order.starting_at(1, 2)] == every[3:]
