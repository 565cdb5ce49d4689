from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import default_collate

from funcpipe.errors import DataError
from funcpipe.training.batches import Batches, sample_order
from funcpipe.training.data import as_batch, load_batch
from funcpipe.training.first_batch import first_batch
from funcpipe.training.loading import SeededDataset


@given(st.integers(1, 200), st.integers(0, 2**40), st.integers(0, 5))
def test_the_order_is_a_permutation_that_follows_from_seed_and_epoch_alone(samples: int, seed: int, epoch: int) -> None:
    order = sample_order(samples, seed, epoch)
    assert sorted(order) == list(range(samples))
    torch.manual_seed(1)
    torch.randn(3)
    assert sample_order(samples, seed, epoch) == order


def test_epochs_and_seeds_differ() -> None:
    orders = {sample_order(50, seed, epoch) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@given(st.data())
def test_an_epoch_deals_out_every_sample_once_remainders_included(data: st.DataObject) -> None:
    micro_batch = data.draw(st.integers(1, 5))
    global_batch = micro_batch * data.draw(st.integers(1, 5))
    samples = data.draw(st.integers(global_batch, 4 * global_batch))
    batches = Batches(samples=samples, global_batch=global_batch, micro_batch=micro_batch, seed=3)
    steps = batches.epoch(2)
    assert sorted(i for step in steps for m in step.micro_batches for i in m) == list(range(samples))
    assert [step.number for step in steps] == list(range(2 * len(steps), 3 * len(steps)))
    assert len(steps) == batches.steps_per_epoch
    assert batches.micro_batch_sizes == {len(m) for step in steps for m in step.micro_batches}
    assert all(step.samples == global_batch for step in steps[:-1])
    assert all(len(m) == micro_batch for step in steps for m in step.micro_batches[:-1])


def test_the_order_can_be_the_dataset_s_own() -> None:
    batches = Batches(samples=5, global_batch=4, micro_batch=2, seed=3, shuffle=False)
    assert [step.micro_batches for step in batches.epoch(7)] == [((0, 1), (2, 3)), ((4,),)]


def test_data_too_short_for_one_batch_is_refused() -> None:
    with pytest.raises(DataError, match="3 samples, too few for one global batch of 4; plan for a smaller batch"):
        Batches(samples=3, global_batch=4, micro_batch=2, seed=0)


def test_samples_are_stacked_inputs_apart_from_the_target() -> None:
    loaded = load_batch([(torch.ones(2), torch.zeros(1), i) for i in range(4)], [1, 3])
    assert [tuple(tensor.shape) for tensor in loaded.args] == [(2, 2), (2, 1)]
    assert loaded.target.tolist() == [1, 3]


def test_dictionaries_are_the_arguments_of_a_model_and_their_labels_the_target() -> None:
    loaded = load_batch([{"x": torch.ones(2) * i, "labels": i} for i in range(4)], [1, 3])
    assert loaded.args == ()
    assert loaded.kwargs["x"].tolist() == [[1, 1], [3, 3]]
    assert loaded.kwargs["labels"].tolist() == loaded.target.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("names", "target"),
    [
        (["x"], []),
        (["x", "label"], ["label"]),
        (["x", "labels", "next_sentence_label"], ["labels", "next_sentence_label"]),
        (["x", "start_positions", "end_positions"], ["start_positions", "end_positions"]),
    ],
)
def test_labels_are_found_by_the_names_that_hugging_face_gives_them(names: list[str], target: list[str]) -> None:
    found = as_batch({name: number for number, name in enumerate(names)}).target
    expected = {name: names.index(name) for name in target}
    assert found == (next(iter(expected.values())) if len(target) == 1 else expected or None)


class ByKeyword(nn.Module):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return x


class Whole(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"]


@pytest.mark.parametrize("function", [None, default_collate])
def test_a_dictionary_beside_a_target_is_what_the_model_takes(function: Any) -> None:
    samples = [({"x": torch.ones(2) * i}, i) for i in range(4)]
    first = first_batch(samples, 3, function, ByKeyword())
    assert first.batch.args == ()
    assert first.batch.kwargs["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert first.batch.target.tolist() == [0, 1, 2]
    assert first.collated is None
    seeded = SeededDataset(samples, 0, 0).batch([3, 1], first.collate)
    assert seeded.kwargs["x"].tolist() == [[3, 3], [1, 1]]
    assert seeded.target.tolist() == [3, 1]
    whole = first_batch(samples, 3, function, Whole())
    assert whole.batch.kwargs == {}
    assert whole.batch.args[0]["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert whole.collate is function


@pytest.mark.parametrize("sample", [3, torch.ones(2), (torch.ones(2),)])
def test_a_sample_without_a_target_is_refused(sample: Any) -> None:
    with pytest.raises(DataError, match=r"sample 0 of the dataset is a .*; each must be a tuple of the model's inputs"):
        load_batch([sample], [0])
