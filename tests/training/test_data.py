"""What samples and batches become: the arguments of the model, and the target."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from funcpipe.errors import DataError
from funcpipe.training.data import LoadedBatch, as_batch, load_batch
from funcpipe.training.first_batch import first_batch
from funcpipe.training.loading import SeededDataset


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


def test_a_collate_function_may_make_the_batch_itself() -> None:
    made = LoadedBatch(args=(torch.ones(2),), kwargs={"scale": 3}, target=torch.zeros(2))
    assert load_batch([(0, 1), (2, 3)], [0, 1], lambda samples: made) is made
