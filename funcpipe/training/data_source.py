"""Users' data in one form, and as it lies in the run's storage: once, for all stages that load it.

Given is a map-style dataset, or a DataLoader of one, which says how it is to be loaded; stored are

    data/dataset.bundle     the dataset's code, and how it is loaded: read only if a stage's code names its digest
    data/dataset.tensors    the tensors of that
    data/shard-000000       of a dataset that is tensors in memory, one shard after the other

What a run is evaluated on has the same objects, called data/evaluation.dataset.bundle and so on. Functions read the
bundle when they start, and shards when they train on samples of them.
"""

import hashlib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import cloudpickle
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from funcpipe.comm import codec
from funcpipe.core.texts import error_text
from funcpipe.errors import CorruptMessage, DataError
from funcpipe.model.split.bundle import dump_value, load_value
from funcpipe.platforms.base import RequestMeter, Storage
from funcpipe.training.data import Collate, MapDataset, MeteredFactory
from funcpipe.training.tensor_table import TableContents, TableForm, TensorTable

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
    """A dataset, how it is loaded, and whether it is shuffled and in batches of what size, if that has been said.

    With `drop_last`, a last global batch that is not full is left out.

    `start_method` is how the user's DataLoader starts processes on this machine.
    """

    dataset: MapDataset
    options: LoaderOptions = field(default_factory=LoaderOptions)
    shuffle: bool | None = None
    batch_size: int | None = None
    drop_last: bool = False
    start_method: str | None = None


def data_source(given: Any) -> DataSource:
    """Return the data that a user has given, a dataset or a DataLoader, as a DataSource.

    Of a DataLoader, its dataset, `collate_fn`, processes, shuffling and `drop_last` are taken over; the plan says how
    large batches are. Raises DataError for what cannot be taken over.
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
    return DataSource(
        dataset=dataset,
        options=options,
        shuffle=_shuffles(given),
        batch_size=given.batch_size,
        drop_last=given.drop_last,
        start_method=_start_method(given),
    )


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


def call_arguments(inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments that a module is called with."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return ((inputs,) if isinstance(inputs, Tensor) else tuple(inputs)), {}


class DatasetFactory:
    """A factory that returns the dataset that it was given."""

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset

    def __call__(self) -> MapDataset:
        """Return the dataset."""
        return self._dataset


_BUNDLE = "dataset.bundle"

_TENSORS = "dataset.tensors"


@dataclass(frozen=True, kw_only=True)
class StoredData:
    """A stage's reference to the data: the SHA-256 of its bundle, and the form of its shards if it has any."""

    bundle_sha256: str
    table: TableForm | None = None

    def open(self, storage: Storage, key_of: Callable[[str], str], meter: RequestMeter) -> DataSource:
        """The dataset, and how to load it; `key_of` gives the keys of its objects, `meter` counts what it asks for.

        Raises CorruptMessage if the bundle in storage is another than that of the stage's code.
        """
        bundle = storage.get(key_of(_BUNDLE))
        if hashlib.sha256(bundle).hexdigest() != self.bundle_sha256:
            raise CorruptMessage(f"{key_of(_BUNDLE)} is not the data that the stage's code names: its SHA-256 differs")
        tensors = codec.decode(storage.get(key_of(_TENSORS)))
        factory, options = load_value(bundle, tensors)
        if self.table is None:
            made = factory.open(meter) if isinstance(factory, MeteredFactory) else factory()
            return DataSource(dataset=made, options=options)

        def read(shard: int) -> Mapping[str, Tensor]:
            return codec.decode(storage.get(key_of(_shard(shard))))

        return DataSource(dataset=TensorTable(self.table, read), options=options)


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Data that can be sent: its code as bytes, the tensors of that, and its contents if it is tensors in memory."""

    bundle: bytes
    tensors: Mapping[str, Tensor]
    table: TableContents | None

    @property
    def stored(self) -> StoredData:
        """The reference of stages' code to it."""
        return StoredData(
            bundle_sha256=hashlib.sha256(self.bundle).hexdigest(),
            table=None if self.table is None else self.table.form,
        )

    def objects(self) -> Iterator[tuple[str, bytes | memoryview]]:
        """Yield its objects, by their names."""
        yield _BUNDLE, self.bundle
        yield _TENSORS, codec.encode(self.tensors)
        for number, shard in enumerate(self.table.shards() if self.table is not None else ()):
            yield _shard(number), codec.encode(shard)


def prepare_data(
    factory: Callable[[], MapDataset], options: LoaderOptions, *, table: TableContents | None
) -> PreparedData:
    """The data that `factory` makes in functions, or whose contents are `table`. Raises DataError if it cannot."""
    try:
        bundle, tensors = dump_value((None if table is not None else factory, options))
    except Exception as error:
        raise DataError(
            f"the data cannot be sent to functions: {error_text(error)}; "
            "give a factory instead, which makes the dataset inside the functions"
        ) from error
    return PreparedData(bundle=bundle, tensors=tensors, table=table)


def _shard(number: int) -> str:
    return f"shard-{number:06d}"


def of_evaluation(name: str) -> str:
    """Return the name of the object `name` of the data that a run is evaluated on, beside what it is trained on."""
    return f"evaluation.{name}"
