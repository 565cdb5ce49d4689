"""What users give as data and arguments: taken over where that can be, refused with the way out where it cannot."""

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from funcpipe.errors import DataError
from funcpipe.training.data_source import DatasetFactory, SourceFactory, call_arguments, data_source, is_factory
from funcpipe.training.losses import LossWithTarget, loss_of_output

DATA = TensorDataset(torch.zeros(6, 2), torch.zeros(6))


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True), torch.stack(
        [y for _, y in samples]
    )


def test_a_dataset_is_taken_as_it_is_and_a_loader_by_its_parts() -> None:
    assert data_source(DATA).dataset is DATA
    assert data_source(DATA).shuffle is None
    found = data_source(
        DataLoader(DATA, batch_size=5, shuffle=True, collate_fn=padded, num_workers=2, prefetch_factor=3)
    )
    assert (found.dataset, found.shuffle, found.options.collate) == (DATA, True, padded)
    assert (found.options.workers, found.options.prefetch_factor) == (2, 3)
    plain = data_source(DataLoader(DATA))
    assert (plain.shuffle, plain.options.collate, plain.options.workers) == (False, None, 0)


def test_factories_are_called_and_may_make_loaders() -> None:
    assert is_factory(lambda: DATA)
    assert is_factory(TensorDataset)
    assert not is_factory(DATA)
    assert not is_factory(DataLoader(DATA))
    assert SourceFactory(lambda: DataLoader(DATA))() is DATA


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Stream(), "Stream is an IterableDataset.*list\\(dataset\\) if it fits into memory"),
        (DataLoader(Stream()), "Stream is an IterableDataset"),
        (NoLength(), "NoLength does not tell how many samples it has.*__len__"),
        (iter(()), "has no __getitem__"),
        ({"x": 1}, "a dictionary of 'x'; give a dataset with a sample at each index"),
        (DataLoader(DATA, batch_size=None), "batch_size=None"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 6, 6)), "sampler of its own, WeightedRandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "draws 6 samples with replacement"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_with_the_way_out(given: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        data_source(given)


def test_a_batch_sampler_of_its_own_is_refused() -> None:
    class Own(BatchSampler):
        pass

    with pytest.raises(DataError, match="batch_sampler of its own, Own"):
        data_source(DataLoader(DATA, batch_sampler=Own(SequentialSampler(DATA), 2, drop_last=False)))


X = torch.ones(2)


def test_inputs_are_passed_by_position_or_by_name() -> None:
    assert call_arguments(X) == ((X,), {})
    assert call_arguments((X, 3)) == ((X, 3), {})
    assert call_arguments({"x": X}) == ((), {"x": X})


def test_a_module_may_compute_its_own_loss_as_an_attribute_or_an_item() -> None:
    assert loss_of_output(SimpleNamespace(loss=X), None) is X
    assert loss_of_output({"loss": X}, None) is X
    for output in (X, {"logits": X}, SimpleNamespace(loss=3.0)):
        with pytest.raises(DataError, match=f"the module's output, a {type(output).__name__}, holds no loss"):
            loss_of_output(output, None)


def test_a_loss_with_its_target_and_a_dataset_can_be_sent_to_functions() -> None:
    loss = pickle.loads(pickle.dumps(LossWithTarget(F.mse_loss, torch.zeros(2))))  # noqa: S301 - our own bytes
    assert loss(X) == 1.0
    assert pickle.loads(pickle.dumps(DatasetFactory([1, 2])))() == [1, 2]  # noqa: S301 - our own bytes
