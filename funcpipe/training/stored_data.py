"""The data of a run as it lies in the run's storage: once, for all stages that load it.

    data/dataset.bundle     the dataset's code, and how it is loaded: read only if a stage's code names its digest
    data/dataset.tensors    the tensors of that
    data/shard-000000       of a dataset that is tensors in memory, one shard after the other

What a run is evaluated on has the same objects, called data/evaluation.dataset.bundle and so on.

Functions read the bundle when they start, and shards when they train on samples of them.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from funcpipe.comm import codec
from funcpipe.core.texts import error_text
from funcpipe.errors import CorruptMessage, DataError
from funcpipe.model.split.bundle import dump_value, load_value
from funcpipe.platforms.base import Storage
from funcpipe.platforms.request_meter import RequestMeter
from funcpipe.training.data import MapDataset, MeteredFactory
from funcpipe.training.data_source import DataSource, LoaderOptions
from funcpipe.training.tensor_table import TableContents, TableForm, TensorTable

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
