"""The first micro-batches of a dataset, before functions start: read for tracing, and loaded by processes.

Others are cut from the first, or must be collated. torch's own way and most collate functions put samples one below
the other, so that rows of a batch are a batch. Others do not: graphs lie in one tensor, sequences are packed, or time
comes before the batch. One more sample decides: it adds one to the first dimension, and changes nothing else.

Where processes are to load, some are tried: they are sent the dataset, and send batches back.
"""

import copy
import inspect
import multiprocessing
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
from torch import Tensor, nn
from torch.utils.data import DataLoader

from funcpipe.core.cached import cached_property
from funcpipe.core.texts import shortened
from funcpipe.errors import DataError
from funcpipe.model.graph.isolation import preserve_state
from funcpipe.model.tensors import flatten
from funcpipe.training.data import (
    Collate,
    KeywordCollate,
    LoadedBatch,
    MapDataset,
    collated,
    few,
    load_batch,
    read_samples,
    user_code_errors,
)
from funcpipe.training.data_source import DataSource
from funcpipe.training.loading import ByValue, Loaded, Request, Samples, data_loader, process_options, processes
from funcpipe.training.passes import Batch

_KEPT_SAMPLES = 10
"""The samples, spread over the dataset, that are kept to be collated while a model is traced."""

SPREAD = 8
"""The micro-batches, spread over the dataset, of which the largest is profiled."""


@dataclass(frozen=True)
class _KeptSamples:
    """Samples of a dataset from which `collate` makes batches; a micro-batch has so many `samples`."""

    kept: Sequence[Any]
    collate: Collate
    samples: int

    def arguments(self, samples: int, offset: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with so many samples, beginning at `offset`; they repeat if there are too few."""
        chosen = [self.kept[(offset + i) % len(self.kept)] for i in range(samples)]
        batch = _collated(chosen, self.collate, f"{samples} samples")
        return batch.args, dict(batch.kwargs)


@dataclass(frozen=True)
class FirstBatch:
    """A micro-batch, and how others are made: as `collate` says, which torch does without one.

    They are `collated` of samples at hand, or cut from it if that is None.
    """

    batch: LoadedBatch
    collate: Collate | None = None
    collated: _KeptSamples | None = None


def first_batch(dataset: MapDataset, micro_batch: int, collate: Collate | None, model: nn.Module) -> FirstBatch:
    """Return the first micro-batch of `dataset`, as `model` takes it.

    Raises DataError, also for whatever the dataset or `collate` raise.
    """
    indices = range(min(micro_batch, len(dataset)))
    if collate is None:
        batch = load_batch(dataset, indices)
        return FirstBatch(_by_name(batch), KeywordCollate(None)) if _goes_by_name(batch, model) else FirstBatch(batch)
    samples = read_samples(dataset, indices)
    batch = _collated(samples, collate, f"samples {few(indices)} of the dataset")
    if _goes_by_name(batch, model):
        batch, collate = _by_name(batch), KeywordCollate(collate)
    end = samples[0] if hasattr(dataset, "shard_sizes") else read_samples(dataset, [len(dataset) - 1])[0]
    if _can_be_cut([*samples, end], collate):
        return FirstBatch(batch, collate)
    return FirstBatch(batch, collate, _kept_samples(dataset, collate, len(samples)))


def _goes_by_name(batch: LoadedBatch, model: nn.Module) -> bool:
    """Return True if the only input is a dictionary of arguments of `model`, not one that its forward takes whole."""
    if len(batch.args) != 1 or not isinstance(batch.args[0], Mapping):
        return False
    forward, given = inspect.signature(model.forward), batch.args[0]
    if given.keys().isdisjoint(forward.parameters):
        return False
    try:
        forward.bind(**given)
    except TypeError:
        return len(forward.parameters) > 1
    return True


def _by_name(batch: LoadedBatch) -> LoadedBatch:
    return LoadedBatch(kwargs=dict(batch.args[0]), target=batch.target)


def largest_batch(dataset: MapDataset, micro_batch: int, collate: Collate | None, model: nn.Module) -> FirstBatch:
    """Return the micro-batch of so many samples with the largest inputs of some that are spread over `dataset`.

    Raises DataError as `first_batch` does, and for a dataset without so many samples.
    """
    check_enough(dataset, micro_batch)
    first = first_batch(dataset, micro_batch, collate, model)
    if first.collate is None or hasattr(dataset, "shard_sizes"):
        return first
    others = [
        _collated(read_samples(dataset, indices), first.collate, f"samples {few(indices)} of the dataset")
        for indices in spread(len(dataset), micro_batch, SPREAD)
    ]
    return replace(first, batch=max([first.batch, *others], key=_input_bytes))


def check_enough(dataset: MapDataset, micro_batch: int) -> None:
    """Raise DataError for a dataset that does not fill a micro-batch."""
    if len(dataset) < micro_batch:
        raise DataError(
            f"the dataset has {len(dataset)} samples, too few for one micro-batch of {micro_batch}; "
            "profile with a smaller micro_batch or give more data"
        )


def spread(samples: int, micro_batch: int, batches: int) -> Iterator[range]:
    """Yield the indices of so many micro-batches, from the first to the last of the dataset."""
    last = samples - micro_batch
    for number in range(batches):
        first = last * number // max(1, batches - 1)
        yield range(first, first + micro_batch)


def _input_bytes(batch: LoadedBatch) -> int:
    leaves = flatten((batch.args, dict(batch.kwargs)))[0]
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def _kept_samples(dataset: MapDataset, collate: Collate, samples: int) -> _KeptSamples:
    """Samples that are spread over the dataset; the first ones of a dataset that lies in shards."""
    count = min(_KEPT_SAMPLES, len(dataset))
    among = count if hasattr(dataset, "shard_sizes") else len(dataset)
    indices = [first for (first,) in spread(among, 1, count)]
    return _KeptSamples(read_samples(dataset, indices), collate, samples)


def _collated(samples: Sequence[Any], collate: Collate, what: str) -> LoadedBatch:
    """Return a batch of `samples`, which a collate function that takes items out of them leaves as they are."""
    copies = [copy.copy(sample) if isinstance(sample, dict | list) else sample for sample in samples]
    with preserve_state(nn.Module()), user_code_errors(f"the collate_fn fails on {what}"):
        return collated(copies, range(len(copies)), collate)


def _can_be_cut(samples: Sequence[Any], collate: Collate) -> bool:
    """Return True if rows of the inputs of a batch are samples."""
    try:
        batch = _collated(samples, collate, f"{len(samples)} samples")
        longer = _collated([*samples, samples[-1]], collate, f"{len(samples) + 1} samples")
    except DataError:  # of a function for batches of one size
        return True
    leaves, tree = flatten((batch.args, dict(batch.kwargs)))
    others, other_tree = flatten((longer.args, dict(longer.kwargs)))
    if tree.paths("") != other_tree.paths(""):
        return False
    pairs = [(a, b) for a, b in zip(leaves, others, strict=True) if isinstance(a, Tensor) and isinstance(b, Tensor)]
    if any(one.is_nested for one, _ in pairs):
        return True  # which tracing refuses
    count = len(samples)
    grown = [
        (count, *one.shape[1:]) == one.shape and (count + 1, *one.shape[1:]) == other.shape for one, other in pairs
    ]
    return any(grown) and all(
        grows or one.shape == other.shape for grows, (one, other) in zip(grown, pairs, strict=True)
    )


_MODULES = re.compile(r"^([A-Za-z_]\w*\.)+(?=\w+(:|$))")
"""The prefix of the name of an error's class in a traceback."""

MOST = 2
"""The number of processes that are tried."""

_PATIENCE_S = 300.0
"""The time that one of them may take for a micro-batch."""


def try_processes(
    source: DataSource,
    batches: Sequence[Sequence[int]],
    *,
    seed: int,
    keep: Callable[[LoadedBatch], Batch],
) -> None:
    """Load the samples of each of `batches` in a process of its own, as the processes of functions will, if any do.

    They are started as the user's DataLoader starts its own. Raises DataError for what fails there.
    """
    options, dataset = source.options, source.dataset
    context = multiprocessing.get_context(source.start_method)
    if not processes(options, dataset, context):
        return
    by_value = _Unpickled if source.start_method == "fork" else ByValue
    samples = _Tried(dataset, options, seed, keep)
    requests = [Request(0, number, 0, tuple(indices)) for number, indices in enumerate(batches)]
    settings = process_options(options, context) | {"num_workers": len(requests), "timeout": _PATIENCE_S}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few processors, and of forks beside threads: the user's own has said so
        try:
            _load_all(data_loader(by_value(samples), requests, **settings))
        except Exception as error:
            last = _MODULES.sub("", (str(error).strip() or type(error).__name__).splitlines()[-1]).rstrip(".")
            raise DataError(
                f"the DataLoader has num_workers={options.workers}, and a process that loads fails: {shortened(last)}; "
                "give a dataset, a collate_fn and a worker_init_fn that work in a process of their own, or a "
                "DataLoader without num_workers"
            ) from error


def _load_all(loader: DataLoader[Any]) -> None:
    """Fetch each batch of `loader`, and end its processes."""
    batches: Any = iter(loader)
    try:
        for _ in batches:
            pass
    finally:
        batches._shutdown_workers()  # which the traceback of an error would keep


class _Tried(Samples):
    """Samples whose batches must reach another process: one that cannot be pickled would be awaited for ever."""

    def __getitems__(self, request: Request) -> Loaded:
        loaded = super().__getitems__(request)
        ForkingPickler.dumps(loaded)
        return loaded


class _Unpickled:
    """Samples for a process that is forked, and would have this process's own objects otherwise."""

    def __init__(self, samples: Samples) -> None:
        self._pickled = cloudpickle.dumps(samples)

    @cached_property
    def _own(self) -> Samples:
        samples: Samples = cloudpickle.loads(self._pickled)
        return samples

    def __getitems__(self, request: Request) -> Loaded:
        return self._own.__getitems__(request)

    def begin(self, number: int) -> None:
        """Prepare the process of that number."""
        self._own.begin(number)
