"""Samples from all over a dataset are tried before functions start: what does not fit is named by its number."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.errors import DataError
from tests.jobs.scripts import Script, run_over_functions
from tests.jobs.test_refusals import around, assert_equal, refusal, script_of, tensors


class Pooled(nn.Module):
    """Takes any length up to the one it has positions for."""

    def __init__(self, lengths: int = 12) -> None:
        super().__init__()
        self.positions = nn.Embedding(lengths, 8)
        self.body = around(nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Any:
        return self.body((x + self.positions(torch.arange(x.shape[1]))).mean(1))


def with_sample(number: int, sample: Any, samples: list[Any]) -> list[Any]:
    samples[number] = sample
    return samples


def padded(samples: list[Any]) -> tuple[Tensor, Tensor]:
    rows, targets = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True), torch.stack(targets)


def listed(samples: list[Any]) -> tuple[list[Tensor], Tensor]:
    rows, targets = zip(*samples, strict=True)
    return list(rows), torch.stack(targets)


def squeezed(samples: list[Any]) -> tuple[Tensor, Tensor]:
    rows, targets = padded(samples)
    return rows.squeeze(0), targets


MIDDLE = 10
"""One of the samples that are looked at, of 20."""


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ((torch.randn(7, 8), torch.tensor(1)), r"samples 8, 10 .*tensors 0 have the shapes \(5, 8\), \(7, 8\) in samp"),
        ((torch.randn(5, 8), torch.tensor([1])), r"tensors 1 have the shapes \(\), \(1,\) in samples 8 and 10; pad"),
        ((torch.randn(5, 8), torch.tensor(1), 3), r"they hold 2 and 3 parts in samples 8 and 10; give all of the"),
        (
            {"x": torch.randn(5, 8)},
            r"samples 8, 10 of the .*: they are a tuple and a dict in samples 8 and 10; give all",
        ),
        (
            (torch.randn(5, 8).double(), torch.tensor(1)),
            r"sample 10 .*does not fit.*float32 .*but is torch.float64 now",
        ),
        ((torch.full((5, 8), torch.nan), torch.tensor(1)), r"sample 10 of the dataset makes the loss nan: its input"),
    ],
)
def test_a_sample_in_the_middle_that_differs_is_named(sample: Any, said: str) -> None:
    script = script_of(Pooled, lambda: with_sample(MIDDLE, sample, tensors(5, 8)))
    with pytest.raises(DataError, match=said):
        run_over_functions(script)


def test_a_sample_that_the_model_cannot_take_is_named() -> None:
    def samples() -> list[Any]:
        return with_sample(MIDDLE, (torch.randn(15, 8), torch.tensor(1)), tensors(5, 8))

    script = Script(make=lambda: (Pooled(), F.cross_entropy), samples=samples, collate=padded)
    assert "the model fails on sample 10 of the dataset (inputs of the shapes x (4, 15, 8)): positions" in refusal(
        script
    )
    assert_equal(Script(make=lambda: (Pooled(15), F.cross_entropy), samples=samples, collate=padded, global_batch=4))


class Listed(Pooled):
    def forward(self, x: Any) -> Any:
        return super().forward(torch.stack(x))


def test_a_list_as_long_as_the_batch_is_refused_where_a_batch_is_shorter() -> None:
    script = Script(make=lambda: (Listed(), F.cross_entropy), samples=lambda: tensors(5, 8, samples=18), collate=listed)
    assert "the run would have micro-batches of 2, for which the layers of Listed are not right" in refusal(script)


def test_a_batch_of_one_sample_whose_collate_function_drops_a_dimension_is_refused() -> None:
    script = Script(
        make=lambda: (Pooled(), F.cross_entropy), samples=lambda: tensors(5, 8, samples=17), collate=squeezed
    )
    assert "a micro-batch of 1, which the run would have, does not fit the first samples: " in refusal(script)


class Boxes(nn.Module):
    """A loss over as many boxes as each sample has."""

    def forward(self, output: Tensor, boxes: list[Tensor]) -> Tensor:
        return torch.stack([(row - box.mean(0)).square().mean() for row, box in zip(output, boxes, strict=True)]).mean()


def with_boxes() -> list[tuple[Tensor, Tensor]]:
    return [(x, torch.full((1 + i % 3, 3), float(i))) for i, (x, _) in enumerate(tensors(8))]


def boxes_apart(samples: list[Any]) -> tuple[Tensor, list[Tensor]]:
    inputs, boxes = zip(*samples, strict=True)
    return torch.stack(inputs), list(boxes)


def test_lists_of_boxes_need_a_collate_fn_and_train_with_one() -> None:
    said = refusal(Script(make=lambda: (around(), Boxes()), samples=with_boxes))
    assert "tensors 1 have the shapes (1, 3), (2, 3) in samples 0 and 1; pad them to one shape in the dataset" in said
    assert_equal(Script(make=lambda: (around(nn.Tanh()), Boxes()), samples=with_boxes, collate=boxes_apart), replicas=2)


def test_lengths_in_the_order_of_the_data_train_where_no_batch_mixes_them() -> None:
    def samples() -> list[Any]:
        return [*tensors(5, 8, samples=8), *tensors(7, 8, samples=8)]

    assert_equal(Script(make=lambda: (Pooled(), F.cross_entropy), samples=samples, global_batch=8), stages=2)
