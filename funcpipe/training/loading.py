"""Loading of micro-batches in functions: torch's DataLoader, asked for one after the other, ahead of the computation.

A stage that reads inputs of the model, or computes the loss, has a `Loader`. Tasks of the load lane order from it, and
forwards take what was loaded. Samples depend on (seed, epoch, index) alone, so every function loads the same: the
generators are seeded anew for each of them, and data augmentation does not depend on which function loads what.
"""

import functools
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from funcpipe.model.draws import GENERATORS, SHARED_GENERATORS, layer_seed, reseed
from funcpipe.model.graph import Signature
from funcpipe.model.split import StageModule
from funcpipe.training.batches import Batches
from funcpipe.training.data import Collate, LoadedBatch, MapDataset, collated, is_default_collate
from funcpipe.training.data_source import LoaderOptions
from funcpipe.training.passes import Batch
from funcpipe.training.tensor_table import TensorTable


class SeededDataset:
    """`dataset`, with the generators seeded before each sample: within an epoch, a sample is always the same.

    Samples that are tensors in memory draw nothing, and leave the generators to others.
    """

    def __init__(self, dataset: MapDataset, seed: int, epoch: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = epoch
        self._draws = type(dataset) not in (TensorDataset, TensorTable)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if not self._draws:
            return self._dataset[index]
        with SHARED_GENERATORS.loading():
            reseed(layer_seed(self._seed, self._epoch, index, "sample"), GENERATORS)
            return self._dataset[index]

    def batch(self, indices: Sequence[int], collate: Collate | None = None) -> LoadedBatch:
        """Return the samples at `indices` as one batch, made by `collate` or as torch does without one.

        The generators are seeded for `collate` too, from the first of the samples. Raises DataError for samples or
        batches that have no inputs and target.
        """
        samples = [self[index] for index in indices]
        if is_default_collate(collate):
            return collated(samples, indices, collate)
        with SHARED_GENERATORS.loading():
            reseed(layer_seed(self._seed, self._epoch, indices[0], "batch"), GENERATORS)
            return collated(samples, indices, collate)


_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """One micro-batch of a step: the epoch and the indices of its samples."""

    step: int
    micro_batch: int
    epoch: int
    indices: tuple[int, ...]


Loaded = tuple[tuple[int, int], Batch, tuple[float, float]]
"""The place of a micro-batch, what is kept of it, and when loading it began and ended, by the machine's clock."""


class Order:
    """The micro-batches of one replica, in order of training."""

    def __init__(self, batches: Batches, *, epochs: int, replica: int, replicas: int) -> None:
        self._batches = batches
        self._epochs = epochs
        self._replica = replica
        self._replicas = replicas

    def starting_at(self, step: int, micro_batch: int) -> Iterator[Request]:
        """Yield the micro-batches from `micro_batch` of `step` on."""
        for item in self._batches.steps_from(step, self._epochs):
            for m in range(self._replica, len(item.micro_batches), self._replicas):
                if item.number > step or m >= micro_batch:
                    yield Request(item.number, m, item.epoch, item.micro_batches[m])


class Loader:
    """Loads micro-batches, and keeps them until they are taken. A context manager: its processes end with it."""

    def __init__(
        self,
        dataset: MapDataset,
        options: LoaderOptions,
        order: Order,
        *,
        seed: int,
        keep: Callable[[LoadedBatch], Batch],
    ) -> None:
        """`keep` picks, of a loaded micro-batch, what the stage needs."""
        self._samples = Samples(dataset, options, seed, keep)
        self._options = options
        self._workers = processes(options, dataset, _start_method())
        self._order = order
        self._coming: Iterator[Loaded] | None = None
        self._next: Iterator[Request] = iter(())
        self._kept: dict[tuple[int, int], Batch] = {}
        self._ended_s = 0.0

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._coming = None
        self._kept = {}

    def begin_step(self, step: int) -> bool:
        """Drop micro-batches of other steps; returns True if those of `step` are loaded already."""
        self._kept = {place: batch for place, batch in self._kept.items() if place[0] == step}
        return bool(self._kept)

    def load(self, step: int, micro_batch: int) -> tuple[float, float] | None:
        """Load a micro-batch. Asked for in order, they are prefetched; out of order, loading begins anew there.

        If processes load: how many seconds ago they had loaded those before it, or began it, and ended.
        """
        wanted = step, micro_batch
        expected = next(self._next, None)
        if self._coming is None or expected is None or expected[:2] != wanted:
            self._next = self._order.starting_at(*wanted)
            next(self._next)
            self._coming = iter(self._loader(step, micro_batch))
        place, batch, (began_s, ended_s) = next(self._coming)
        assert place == wanted, f"the loader has loaded micro-batch {place}, not {wanted}"
        self._kept[place] = batch
        if not self._workers:
            return None
        began_s, now_s = max(began_s, self._ended_s), time.monotonic()
        self._ended_s = max(ended_s, began_s)
        return now_s - began_s, now_s - self._ended_s

    def take(self, step: int, micro_batch: int) -> Batch:
        """Return a micro-batch that was loaded; it is no longer kept here."""
        return self._kept.pop((step, micro_batch))

    def _loader(self, step: int, micro_batch: int) -> DataLoader[Any]:
        requests = _Requests(self._order, step, micro_batch)
        if not self._workers:
            return data_loader(self._samples, requests)
        return data_loader(ByValue(self._samples), requests, **process_options(self._options, _start_method()))


class _Requests:
    """The requests from one place on, again and again: what a DataLoader takes for batches of indices."""

    def __init__(self, order: Order, step: int, micro_batch: int) -> None:
        self._order, self._step, self._micro_batch = order, step, micro_batch

    def __iter__(self) -> Iterator[Request]:
        return self._order.starting_at(self._step, self._micro_batch)


class Samples(Dataset[Any]):
    """The dataset of a DataLoader: a request fetches the whole micro-batch, seeded and collated."""

    def __init__(
        self, dataset: MapDataset, options: LoaderOptions, seed: int, keep: Callable[[LoadedBatch], Batch]
    ) -> None:
        self._dataset = dataset
        self._collate, self._begin = options.collate, options.worker_init_fn
        self._seed = seed
        self._keep = keep

    def begin(self, number: int) -> None:
        """Prepare the process of that number as the user wants it, who finds the dataset by `get_worker_info`."""
        object.__setattr__(get_worker_info(), "dataset", self._dataset)  # which forbids assignments
        if self._begin is not None:
            self._begin(number)

    def __getitems__(self, request: Request) -> Loaded:
        began_s = time.monotonic()
        seeded = SeededDataset(self._dataset, self._seed, request.epoch)
        batch = self._keep(seeded.batch(request.indices, self._collate))
        return (request.step, request.micro_batch), batch, (began_s, time.monotonic())


class ByValue:
    """Samples for another process: users' classes, which need not be importable, go by value."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return cloudpickle.loads, (cloudpickle.dumps(self._wrapped),)


def data_loader(samples: Any, requests: Iterable[Request], **options: Any) -> DataLoader[Any]:
    """Return a DataLoader that fetches each of `requests` from `samples`, in their order."""
    return DataLoader(
        samples,
        batch_sampler=requests,  # type: ignore[arg-type]  # a request is a batch
        collate_fn=_as_it_is,
        generator=torch.Generator(),  # torch draws the seeds of processes from the global one otherwise
        **options,
    )


def process_options(options: LoaderOptions, context: BaseContext) -> dict[str, Any]:
    """Return the options for the processes of a DataLoader."""
    return {
        "num_workers": options.workers,
        "prefetch_factor": options.prefetch_factor,
        "worker_init_fn": _begin,
        "multiprocessing_context": context,
    }


def _begin(number: int) -> None:
    info: Any = get_worker_info()
    info.dataset.begin(number)


def _start_method() -> BaseContext:
    """Return how functions start processes: from a server of one thread, as forking one of many may stall it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", __name__])
    return context


def batch_selector(stage: StageModule, signature: Signature) -> Callable[[LoadedBatch], Batch]:
    """Picks, of a loaded micro-batch, the inputs that `stage` reads, and the target where it computes the loss.

    `signature`, the model's, gives its inputs their names. Nothing of the stage is held: processes that load are sent
    a copy.
    """
    return functools.partial(_kept, signature, tuple(stage.inputs), stage.is_last)


def whole_batch(signature: Signature) -> Callable[[LoadedBatch], Batch]:
    """Picks all inputs of the model, and the target."""
    return functools.partial(_kept, signature, signature.tensors, True)


def _kept(signature: Signature, names: Sequence[str], with_target: bool, loaded: LoadedBatch) -> Batch:
    inputs = signature.bind(loaded.args, loaded.kwargs)
    return {name: inputs[name] for name in names}, loaded.target if with_target else None


def _as_it_is(batch: Any) -> Any:
    return batch


def processes(options: LoaderOptions, dataset: MapDataset, context: BaseContext) -> int:
    """Return the number of processes that load: as asked for, where there can be any and they are of use."""
    reads_storage = isinstance(dataset, TensorTable) or hasattr(dataset, "shard_sizes")
    if not options.workers or reads_storage:  # whose client cannot fork, and whose requests are counted here
        return 0
    try:
        context.Lock()
    except (OSError, ImportError, ValueError) as error:
        _log.warning(
            "loads in a thread, as this platform has nothing that %d processes need: %s", options.workers, error
        )
        return 0
    return options.workers
