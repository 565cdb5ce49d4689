"""Tensors in memory as shards: the same samples, only the shards that are needed, and few of them at once."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from funcpipe.training import tensor_table
from funcpipe.training.tensor_table import TableContents, TensorTable, as_table


def table_of(dataset: Any, monkeypatch: pytest.MonkeyPatch, shard_bytes: int) -> TableContents:
    monkeypatch.setattr(tensor_table, "SHARD_BYTES", shard_bytes)
    found = as_table(dataset)
    assert found is not None
    return found


NUMBERS = torch.arange(20).reshape(10, 2)
DATASETS: dict[str, Any] = {
    "tensors": TensorDataset(NUMBERS, NUMBERS[:, 0].double()),
    "tuples": [(NUMBERS[i], i, i / 2) for i in range(10)],
    "dictionaries": [{"x": NUMBERS[i], "labels": i} for i in range(10)],
}


@pytest.mark.parametrize("kind", DATASETS)
def test_samples_are_those_of_the_dataset(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, contents = DATASETS[kind], table_of(DATASETS[kind], monkeypatch, 100)
    shards = list(contents.shards())
    table = TensorTable(contents.form, lambda number: shards[number])
    assert len(table) == 10
    assert len(shards) == contents.form.shards > 1
    for i in range(10):
        found, expected = table[i], dataset[i]
        assert type(found) is type(expected)
        for one, other in zip(*(s.values() if isinstance(s, dict) else s for s in (found, expected)), strict=True):
            assert type(one) is type(other)
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    with pytest.raises(IndexError):
        table[10]


def test_only_needed_shards_are_read_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = table_of(DATASETS["tensors"], monkeypatch, 2 * 24)  # two samples of 24 bytes
    shards, read = list(contents.shards()), []

    def get(number: int) -> Mapping[str, Tensor]:
        read.append(number)
        return shards[number]

    table = TensorTable(contents.form, get)
    for i in (3, 8, 2, 9):
        table[i]
    assert read == [1, 4]
    monkeypatch.setattr(tensor_table, "KEPT_BYTES", 2 * 48)
    assert contents.form.kept_bytes == 4 * 24
    for i in (0, 3, 0, 8, 0, 3):  # shard 1 goes for shard 0, 4 for 1, 1 for 4
        table[i]
    assert read == [1, 4, 0, 1, 4, 1]


@pytest.mark.parametrize(
    "dataset",
    [
        [],
        [1, 2],
        [(torch.zeros(2), "text")],
        [(torch.zeros(2), 0), (torch.zeros(3), 0)],
        [(torch.zeros(2), 2**70)],
        [(torch.zeros(2), 1), (torch.zeros(2), 1.0)],
        [(torch.zeros(2, requires_grad=True), 0)],
        [{"x": torch.zeros(1)}, {"y": torch.zeros(1)}],
        TensorDataset(torch.zeros(0, 2)),
    ],
)
def test_other_datasets_are_no_tables(dataset: Any) -> None:
    assert as_table(dataset) is None
