"""Data as users give it: opened, sampled, and tried before functions start.

The first samples of a dataset may be similar, so that trials take some from all over it.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from funcpipe.core.cached import cached_property
from funcpipe.data.sources import from_url
from funcpipe.errors import DataError, FuncPipeError
from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.equivalence import run_layers
from funcpipe.model.graph.isolation import in_turn, preserve_state
from funcpipe.model.graph.user_code import source_location
from funcpipe.model.tensors import flatten, tree_map
from funcpipe.training.batches import Batches
from funcpipe.training.data import (
    Collate,
    LoadedBatch,
    MapDataset,
    MeteredFactory,
    is_default_collate,
    load_batch,
    one_batch,
    read_samples,
    user_code_errors,
)
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
from funcpipe.training.first_batch import MOST, FirstBatch, first_batch, spread, try_processes
from funcpipe.training.loading import whole_batch
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


_MOST = 32
_MOST_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class SpreadSamples:
    """The samples at `indices`, which are spread over a dataset; `load` loads any as one batch, or raises DataError.

    A global batch has `global_batch` of them, a micro-batch `micro_batch`, as far as there are so many.
    """

    load: Callable[[Sequence[int]], LoadedBatch]
    indices: tuple[int, ...]
    micro_batch: int
    global_batch: int

    @cached_property
    def batch(self) -> LoadedBatch | None:
        """All of them, if they make one batch."""
        try:
            return self.load(self.indices)
        except DataError:  # a collate_fn may be for batches of one size
            return None

    def unlike(self, count: int) -> list[int]:
        """So many indices: of samples in which a number comes often, as where they are padded, and seldom."""
        half = count // 2
        return [*self._ordered[: count - half], *(self._ordered[-half:] if half else [])]

    @cached_property
    def _ordered(self) -> list[int]:
        """The indices by how often the most frequent number of a sample comes in it, in the most distinctive tensor.

        Where it comes equally often in all, as in classes, by the numbers themselves.
        """
        tensors = [] if self.batch is None else _whole_numbers(self.batch, len(self.indices))
        often = [[int(row.unique(return_counts=True)[1].max()) for row in tensor] for tensor in tensors]
        totals = [[int(row.sum()) for row in tensor] for tensor in tensors]
        distinctive = max(often, key=_span, default=list(self.indices))
        if not _span(distinctive):
            distinctive = max(totals, key=_span, default=list(self.indices))
        pairs = zip(distinctive, self.indices, strict=True)
        return [index for _, index in sorted(pairs)]


def spread_samples(
    dataset: MapDataset,
    collate: Collate | None,
    *,
    first: LoadedBatch,
    samples: int,
    micro_batch: int,
    global_batch: int,
) -> SpreadSamples:
    """Some of the first `samples` samples of `dataset`, which fit into memory beside its `first` micro-batch.

    Of samples in shards, they come from one part of the dataset.
    """
    one_bytes = sum(leaf.nbytes for leaf in _tensors(first)) // min(micro_batch, samples) + 1
    count = min(samples, max(2, min(_MOST, _MOST_BYTES // one_bytes)))
    if hasattr(dataset, "shard_sizes"):
        begin = min(samples // 2, samples - count)
        indices = list(range(begin, begin + count))
    else:
        indices = sorted(random.Random(0).sample(range(samples), count))
    return SpreadSamples(
        load=lambda chosen: load_batch(dataset, chosen, collate),
        indices=tuple(indices),
        micro_batch=min(micro_batch, samples),
        global_batch=min(global_batch, samples),
    )


def _tensors(batch: LoadedBatch) -> list[Tensor]:
    leaves: list[Any] = flatten((batch.args, dict(batch.kwargs), batch.target))[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _whole_numbers(batch: LoadedBatch, samples: int) -> list[Tensor]:
    """The tensors of whole numbers that have a row for each sample."""
    return [
        leaf
        for leaf in _tensors(batch)
        if leaf.dim()
        and leaf.size(0) == samples
        and leaf.numel()
        and not leaf.dtype.is_floating_point
        and not leaf.is_complex()
    ]


def _span(values: Sequence[float]) -> float:
    return max(values) - min(values)


SPREAD = 8
"""The number of samples that are tried."""

_LIMIT_S = 2.0
"""No further sample is read after so long."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A batch that holds the sample at `index` as often as a micro-batch has samples, and its inputs by name."""

    index: int
    batch: LoadedBatch
    inputs: Mapping[str, Tensor]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the inputs."""
        return tuple(tuple(tensor.shape) for tensor in self.inputs.values())

    @property
    def elements(self) -> int:
        """The elements of all inputs together."""
        return sum(tensor.numel() for tensor in self.inputs.values())


def check_samples(
    graph: LayerGraph,
    model: nn.Module,
    dataset: MapDataset,
    collate: Collate | None,
    batches: Batches,
    *,
    training: bool = True,
    cut: bool = True,
) -> tuple[Trial, ...]:
    """Try a few samples of all over `dataset`, the first one first, and micro-batches of the sizes that `batches` has.

    Of the samples whose inputs have other shapes than the first, the largest and the smallest run through the layers of
    `graph`, which `model` was traced to. What only the collate function can make batches of is not `cut`. Returns what
    was tried. Raises DataError, which names the sample.
    """
    trials: list[Trial] = []
    samples = _Samples(graph, dataset, collate, batches)
    began_s = time.monotonic()
    with preserve_state(nn.Module()):  # samples may draw random numbers
        for index in sorted({index for (index,) in spread(batches.samples, 1, SPREAD)}):
            trials.append(samples.trial(index))
            if time.monotonic() - began_s > _LIMIT_S:
                break
        if collate is not None and cut:
            samples.check_sizes()
    others = sorted((trial for trial in trials if trial.shapes != trials[0].shapes), key=lambda trial: trial.elements)
    for trial in (*others[:1], *others[1:][-1:]):
        _run(graph, model, trial, training=training, cut=cut)
    return tuple(trials)


def check_processes(
    graph: LayerGraph, factory: Callable[[], MapDataset], source: DataSource, batches: Batches, *, seed: int = 0
) -> None:
    """Load the first and the last micro-batch in processes, if processes of functions are to load what `source` says.

    Raises DataError for what fails there. Tensors in memory are loaded in threads.
    """
    if not source.options.workers or (isinstance(factory, DatasetFactory) and as_table(source.dataset) is not None):
        return
    size = min(batches.micro_batch, batches.samples)
    starts = (0, batches.samples - size)[: min(source.options.workers, MOST)]
    chosen = [range(start, start + size) for start in starts]
    try_processes(source, chosen, seed=seed, keep=whole_batch(graph.signature))


@dataclass(frozen=True)
class _Samples:
    """Samples of a dataset, each of which is read once."""

    graph: LayerGraph
    dataset: MapDataset
    collate: Collate | None
    batches: Batches
    read: dict[int, Any] = field(default_factory=dict)

    def trial(self, index: int) -> Trial:
        """A micro-batch of the sample at `index`, which must fit those that may lie beside it."""
        beside = self.batches.beside(index)
        if is_default_collate(self.collate) and beside != index:
            one_batch([self._sample(beside), self._sample(index)], [beside, index], self.collate)
        batch = self._repeated(index, max(self.batches.micro_batch_sizes))
        return Trial(index=index, batch=batch, inputs=self._bound(batch, f"sample {index} of the dataset"))

    def check_sizes(self) -> None:
        """Raise DataError if the inputs for fewer samples are of another structure."""
        for size in self.batches.micro_batch_sizes:
            self._bound(self._repeated(0, size), f"a micro-batch of {size}, which the run would have,")

    def _repeated(self, index: int, size: int) -> LoadedBatch:
        try:
            return one_batch([self._sample(index) for _ in range(size)], [index] * size, self.collate)
        except DataError:  # a collate_fn may be for samples that differ
            first = max(min(index, self.batches.samples - size), 0)
            return load_batch(self.dataset, range(first, first + size), self.collate)

    def _sample(self, index: int) -> Any:
        """The sample, in containers of its own, from which a collate_fn may take items."""
        if index not in self.read:
            (self.read[index],) = read_samples(self.dataset, [index])
        return tree_map(self.read[index], lambda leaf: leaf)

    def _bound(self, batch: LoadedBatch, what: str) -> Mapping[str, Tensor]:
        try:
            return self.graph.signature.bind(batch.args, batch.kwargs)
        except DataError as error:
            raise DataError(f"{what} does not fit the first samples: {error}") from error


def _run(graph: LayerGraph, model: nn.Module, trial: Trial, *, training: bool, cut: bool) -> None:
    try:
        run_layers(graph, model, trial.inputs, training=training)
    except FuncPipeError as error:
        if cut:  # else one sample several times may be an unusual batch
            raise DataError(f"sample {trial.index} of the dataset does not fit the first samples: {error}") from error
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in trial.inputs.items())
        raise DataError(
            f"the model fails on sample {trial.index} of the dataset (inputs of the shapes {shapes}): "
            f"{source_location(model, error)[1]}; cut or leave out such samples, or make the model for them"
        ) from error
