"""Data as users give it: opened here to be checked, and as a factory for functions."""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from funcpipe.data.sources import from_url
from funcpipe.errors import DataError
from funcpipe.model.graph.isolation import in_turn
from funcpipe.training.data import MapDataset, MeteredFactory, user_code_errors
from funcpipe.training.data_source import (
    Data,
    DatasetFactory,
    DataSource,
    LoaderOptions,
    PreparedData,
    SourceFactory,
    data_source,
    is_factory,
    prepare_data,
)
from funcpipe.training.first_batch import FirstBatch, first_batch
from funcpipe.training.tensor_table import as_table


@in_turn()
def open_data(given: Data) -> tuple[Callable[[], MapDataset], DataSource]:
    """A factory of the dataset for functions, and the dataset itself with how it is loaded.

    A factory may also return a URL, or a factory of `funcpipe.data`.

    Raises DataError for what cannot be loaded sample by sample, StorageError if it cannot be read.
    """
    data = from_url(given) if isinstance(given, str) else given
    if not is_factory(data):
        source = data_source(data)
        return DatasetFactory(source.dataset), source
    with user_code_errors("the factory of the data, called without arguments, fails"):
        made = data()
    if isinstance(made, str | MeteredFactory):  # of which the index is read here once, and travels to functions
        return open_data(made)
    if is_factory(made):
        name = getattr(made, "__name__", type(made).__name__)
        raise DataError(f"the factory of the data returns another one, {name}; return what that makes, {name}()")
    return data if isinstance(data, MeteredFactory) else SourceFactory(data), data_source(made)


def open_with_first(
    given: Data, model: nn.Module, *, micro_batch: int
) -> tuple[Callable[[], MapDataset], DataSource, FirstBatch]:
    """The same, with the first micro-batch as `model` takes it, and loaded as that one is. Raises DataError."""
    factory, source = open_data(given)
    first = first_batch(source.dataset, micro_batch, source.options.collate, model)
    return factory, replace(source, options=replace(source.options, collate=first.collate)), first


def sendable(factory: Callable[[], MapDataset], options: LoaderOptions) -> PreparedData:
    """The data as it is sent: the contents of tensors in memory, the code of anything else. Raises DataError."""
    table = as_table(factory()) if isinstance(factory, DatasetFactory) else None
    return prepare_data(factory, options, table=table)
