"""Users' data in one form: a map-style dataset, and the way in which a DataLoader is to load it."""

import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import cloudpickle
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from funcpipe.errors import DataError
from funcpipe.training.data import Collate, MapDataset

Data = str | MapDataset | DataLoader[Any] | Callable[[], Any]
"""The data that users give: a map-style dataset, a DataLoader of one, a factory of either, called inside the functions,
or the URL of a dataset in object storage.
"""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The loading of samples in functions: as the user's DataLoader says, or in a thread of the function.

    `collate` makes a batch of samples, where it is not torch's own way. `workers` processes load, each
    `prefetch_factor` micro-batches ahead and prepared by `worker_init_fn`; without them, a thread loads.
    """

    collate: Collate | None = None
    workers: int = 0
    prefetch_factor: int | None = None
    worker_init_fn: Callable[[int], None] | None = None


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A dataset, how it is loaded, and whether it is shuffled, if that has been said.

    `start_method` is how the user's DataLoader starts processes on this machine.
    """

    dataset: MapDataset
    options: LoaderOptions = field(default_factory=LoaderOptions)
    shuffle: bool | None = None
    start_method: str | None = None


def data_source(given: Any) -> DataSource:
    """Return the data that a user has given, a dataset or a DataLoader, as a DataSource.

    Of a DataLoader, its dataset, `collate_fn`, processes and shuffling are taken over; the plan says how large
    micro-batches are. Raises DataError for what cannot be taken over.
    """
    if not isinstance(given, DataLoader):
        return DataSource(dataset=_map_style(given))
    dataset = _map_style(given.dataset)
    if given.batch_sampler is None:
        raise DataError(
            "a DataLoader with batch_size=None, whose dataset returns whole batches, cannot be cut into micro-batches; "
            "give a dataset that returns single samples"
        )
    if type(given.batch_sampler) is not BatchSampler:
        raise DataError(_own_order("batch_sampler", given.batch_sampler))
    if given.drop_last:
        raise DataError(
            "the DataLoader has drop_last=True, but every sample is trained on, in a smaller last batch; "
            "give a DataLoader without drop_last, or a dataset whose length is a multiple of the global batch"
        )
    options = LoaderOptions(
        collate=None if given.collate_fn is default_collate else given.collate_fn,
        workers=given.num_workers,
        prefetch_factor=given.prefetch_factor,
        worker_init_fn=given.worker_init_fn,
    )
    if options.workers and not hasattr(dataset, "shard_sizes"):
        _check_picklable("dataset", dataset)
        _check_picklable("worker_init_fn", options.worker_init_fn)
        _check_picklable("collate_fn", options.collate)
    return DataSource(dataset=dataset, options=options, shuffle=_shuffles(given), start_method=_start_method(given))


@dataclass(frozen=True)
class SourceFactory:
    """A factory of the dataset of what another factory makes, which may be a DataLoader."""

    make: Callable[[], Any]

    def __call__(self) -> MapDataset:
        """Return the dataset."""
        made = self.make()
        return cast(MapDataset, made.dataset if isinstance(made, DataLoader) else made)


def is_factory(given: Any) -> TypeGuard[Callable[[], Any]]:
    """Return True if `given` is to be called for the data, and not the data itself."""
    return isinstance(given, type) or (callable(given) and not isinstance(given, DataLoader | Dataset | MapDataset))


def _map_style(dataset: Any) -> MapDataset:
    what = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{what} is an IterableDataset, of which functions cannot load the samples of one micro-batch alone; "
            "give a map-style dataset with __len__ and __getitem__, for example list(dataset) if it fits into memory, "
            "or write the samples as shards and read these by funcpipe.data (docs/data.md)"
        )
    if isinstance(dataset, Mapping):
        raise DataError(
            f"the data is a dictionary of {', '.join(map(repr, list(dataset)[:4]))}; give a dataset with a sample "
            "at each index, for example torch.utils.data.TensorDataset(inputs, targets), or a list of dictionaries"
        )
    if dataset is None:
        raise DataError("the data is None; give a dataset, or a factory that returns one")
    if not hasattr(type(dataset), "__getitem__"):
        raise DataError(
            f"{what} has no __getitem__; give a map-style dataset, which returns the sample at an index, "
            "or write the samples as shards and read these by funcpipe.data (docs/data.md)"
        )
    try:
        samples = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise DataError(
            f"{what} does not tell how many samples it has: {error}; give a map-style dataset with __len__"
        ) from error
    if not samples:
        raise DataError(f"the dataset, a {what}, has no samples; give one with at least a global batch of them")
    found: MapDataset = dataset
    return found


def _check_picklable(what: str, value: Any) -> None:
    """Raise DataError for what cannot be given to processes that load."""
    try:
        cloudpickle.dump(value, _Nowhere())
    except Exception as error:
        raise DataError(
            f"the DataLoader has num_workers, but its {what} cannot be given to processes: {type(error).__name__}: "
            f"{error}; open files, locks and the like where a sample is read, or give a DataLoader without num_workers"
        ) from error


class _Nowhere:
    """A file that keeps nothing of what is written."""

    def write(self, data: bytes) -> int:
        return len(data)


def _start_method(loader: DataLoader[Any]) -> str:
    """Return how the DataLoader starts processes; a default that lasts until the program chooses is not fixed here."""
    if loader.multiprocessing_context is not None:
        return str(loader.multiprocessing_context.get_start_method())
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Return True if the DataLoader shuffles. Raises DataError for an order that cannot be taken over."""
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is not RandomSampler:
        raise DataError(_own_order("sampler", sampler))
    if sampler.replacement or sampler.num_samples != len(loader.dataset):  # type: ignore[arg-type]
        raise DataError(
            f"the DataLoader's RandomSampler draws {sampler.num_samples} samples"
            f"{' with replacement' if sampler.replacement else ''}; each sample is trained on once an epoch: "
            "give a DataLoader with shuffle=True"
        )
    return True


def _own_order(what: str, sampler: Any) -> str:
    return (
        f"the DataLoader has a {what} of its own, {type(sampler).__name__}, which cannot be divided among functions: "
        "the order of samples follows from the seed; give a DataLoader with shuffle=True or False, and choose or "
        "repeat samples in the dataset"
    )
