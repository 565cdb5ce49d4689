"""Samples from all over a dataset, tried before functions start: errors that functions would meet are raised here."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from funcpipe.errors import DataError, FuncPipeError
from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.equivalence import run_layers
from funcpipe.model.graph.isolation import preserve_state
from funcpipe.model.graph.user_code import source_location
from funcpipe.model.tensors import tree_map
from funcpipe.training.batches import Batches
from funcpipe.training.data import (
    Collate,
    LoadedBatch,
    MapDataset,
    is_default_collate,
    load_batch,
    one_batch,
    read_samples,
)
from funcpipe.training.data_source import DatasetFactory, DataSource
from funcpipe.training.first_batch import MOST, spread, try_processes
from funcpipe.training.loading import whole_batch
from funcpipe.training.tensor_table import as_table

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
