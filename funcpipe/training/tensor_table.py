"""Datasets that are tensors in memory: cut into shards, uploaded once, and read shard by shard in functions.

A table has columns with a row for each sample. Rows of TensorDatasets and of lists of tuples are tuples, those of
dictionaries of tensors, and of lists of dictionaries, are dictionaries. By hand: 10 samples of 3 MB in shards of at
most 8 MB are the shards 0-1, 2-3, …, 8-9; who trains on samples 3 and 8 reads the second and the last.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

SHARD_BYTES = 4 << 20
"""The most that a shard holds, unless a sample is larger."""

KEPT_BYTES = 512 << 20
"""The most that a function keeps of a table; beyond that, the shards that were read longest ago are dropped."""


@dataclass(frozen=True, kw_only=True)
class TableForm:
    """The form of a table: how rows become samples, and how many of them a shard has.

    `names` are the keys of samples that are dictionaries. `numbers` are columns of Python numbers, by position.
    """

    samples: int
    shard_samples: int
    sample_bytes: int
    names: tuple[str, ...] | None
    numbers: frozenset[int]

    @property
    def shards(self) -> int:
        """The number of shards of the table."""
        return -(-self.samples // self.shard_samples)

    @property
    def kept_shards(self) -> int:
        """The most shards that a function keeps."""
        return max(1, KEPT_BYTES // (self.shard_samples * self.sample_bytes or 1))

    @property
    def kept_bytes(self) -> int:
        """The most bytes of the table that a function holds."""
        return min(self.samples, self.kept_shards * self.shard_samples) * self.sample_bytes


@dataclass(frozen=True, kw_only=True)
class TableContents:
    """The columns of a table as tensors of `form.samples` rows."""

    form: TableForm
    columns: tuple[Tensor, ...]

    def shards(self) -> Iterator[dict[str, Tensor]]:
        """Yield the shards, in order, each with its columns by their number."""
        for first in range(0, self.form.samples, self.form.shard_samples):
            rows = slice(first, first + self.form.shard_samples)
            yield {str(i): column[rows].contiguous() for i, column in enumerate(self.columns)}


class TensorTable:
    """A map-style dataset of a table whose shards `read` reads, by their number; keeps the newest of them."""

    def __init__(self, form: TableForm, read: Callable[[int], Mapping[str, Tensor]]) -> None:
        self._form = form
        self._read = read
        self._kept: OrderedDict[int, Mapping[str, Tensor]] = OrderedDict()

    def __len__(self) -> int:
        return self._form.samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._form.samples:
            raise IndexError(f"sample {index} of {self._form.samples}")
        number, row = divmod(index, self._form.shard_samples)
        shard = self._shard(number)
        values = [shard[str(i)][row] for i in range(len(shard))]
        sample = [value.item() if i in self._form.numbers else value for i, value in enumerate(values)]
        if self._form.names is None:
            return tuple(sample)
        return dict(zip(self._form.names, sample, strict=True))

    def _shard(self, number: int) -> Mapping[str, Tensor]:
        if number not in self._kept:
            self._kept[number] = self._read(number)
            while len(self._kept) > self._form.kept_shards:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]


def as_table(dataset: Any) -> TableContents | None:
    """Return the table that `dataset` is, if it is tensors in memory and nothing else; None for any other dataset."""
    if type(dataset) is TensorDataset:
        return _table(dataset.tensors, names=None)
    if type(dataset) in (list, tuple) and len(dataset) > 0:
        return _table_of_samples(dataset)
    return None


def _table_of_samples(samples: Sequence[Any]) -> TableContents | None:
    first, kind = samples[0], type(samples[0])
    if kind not in (tuple, dict) or any(type(sample) is not kind or len(sample) != len(first) for sample in samples):
        return None
    names = tuple(first) if kind is dict else None
    if names is not None and any(tuple(sample) != names for sample in samples):
        return None
    columns, numbers = [], set()
    for i, key in enumerate(names if names is not None else range(len(first))):
        column = [sample[key] for sample in samples]
        if type(column[0]) in (int, float):
            if any(type(value) is not type(column[0]) for value in column):
                return None
            try:
                columns.append(torch.tensor(column, dtype=torch.int64 if type(column[0]) is int else torch.float64))
            except (OverflowError, RuntimeError, ValueError):  # an integer of more than 64 bits
                return None
            numbers.add(i)
        elif _have_one_form(column):
            columns.append(torch.stack(column))
        else:
            return None
    return _table(columns, names=names, numbers=frozenset(numbers))


def _have_one_form(values: Sequence[Any]) -> bool:
    first = values[0]
    return type(first) is Tensor and all(
        type(value) is Tensor and (value.shape, value.dtype) == (first.shape, first.dtype) and _is_plain(value)
        for value in values
    )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad


def _table(
    columns: Sequence[Tensor], *, names: tuple[str, ...] | None, numbers: frozenset[int] = frozenset()
) -> TableContents | None:
    if not columns or not len(columns[0]) or not all(type(c) is Tensor and _is_plain(c) for c in columns):
        return None
    sample_bytes = sum(column[0].numel() * column.itemsize for column in columns)
    form = TableForm(
        samples=len(columns[0]),
        shard_samples=max(1, SHARD_BYTES // max(1, sample_bytes)),
        sample_bytes=sample_bytes,
        names=names,
        numbers=numbers,
    )
    return TableContents(form=form, columns=tuple(columns))
