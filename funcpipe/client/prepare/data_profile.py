"""The seconds and the memory of loading, measured in this process with a few micro-batches."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcpipe.client.prepare.open_data import open_data
from funcpipe.core import DataProfile
from funcpipe.model.graph.isolation import in_turn, preserve_state
from funcpipe.model.tensors import flatten
from funcpipe.training.data import LoadedBatch, user_code_errors
from funcpipe.training.data_source import DatasetFactory, DataSource, is_factory, prepare_data
from funcpipe.training.first_batch import check_enough, spread
from funcpipe.training.loading import SeededDataset
from funcpipe.training.tensor_table import as_table

BATCHES = 5
"""The micro-batches that are measured, after a first one; they are spread over the dataset."""


@in_turn()
def profile_data(
    dataset: Any, micro_batch: int, *, batches: int = BATCHES, clock: Callable[[], float] = time.perf_counter
) -> DataProfile:
    """Load some micro-batches of `dataset`, which is what `train` takes: seconds are their median.

    Processes of a DataLoader load as many at once. The memory of a factory's dataset is what this process grows by when
    it makes it, that of a dataset given itself what it takes to send. Raises DataError.
    """
    before = _resident_bytes()
    _, source = open_data(dataset)
    grown = max(0, _resident_bytes() - before)
    check_enough(source.dataset, micro_batch)
    resident_bytes = grown if isinstance(dataset, str) or is_factory(dataset) else _sent_bytes(source)
    seeded, seconds, sizes = SeededDataset(source.dataset, 0, 0), [], []
    with preserve_state(torch.nn.Module()):
        for indices in spread(len(source.dataset), micro_batch, batches + 1):
            began_s = clock()
            with user_code_errors(f"samples {indices[0]} to {indices[-1]} of the dataset cannot be loaded"):
                loaded = seeded.batch(indices, source.options.collate)
            seconds.append(clock() - began_s)
            sizes.append((_bytes(loaded), sum(tensor.nbytes for tensor in _tensors(loaded.target))))
    return DataProfile(
        load_s=statistics.median(seconds[1:]) / max(1, source.options.workers),
        batch_bytes=max(size for size, _ in sizes),
        target_bytes=max(target for _, target in sizes),
        resident_bytes=resident_bytes,
    )


def _sent_bytes(source: DataSource) -> int:
    """Bytes that functions hold of a dataset that is sent: its shards, or its pickle and its objects."""
    table = as_table(source.dataset)
    if table is not None:
        return table.form.kept_bytes
    prepared = prepare_data(DatasetFactory(source.dataset), source.options, table=None)
    return 2 * (len(prepared.bundle) + sum(tensor.nbytes for tensor in prepared.tensors.values()))


def _bytes(loaded: LoadedBatch) -> int:
    return sum(tensor.nbytes for tensor in _tensors((loaded.args, dict(loaded.kwargs), loaded.target)))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096
