"""Processes that load, tried before functions start: they are sent the dataset, and send batches back."""

import functools
import multiprocessing
import re
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
from torch.utils.data import DataLoader

from funcpipe.core.texts import shortened
from funcpipe.errors import DataError
from funcpipe.training.data import LoadedBatch
from funcpipe.training.data_source import DataSource
from funcpipe.training.loading import ByValue, Loaded, Request, Samples, data_loader, process_options, processes
from funcpipe.training.passes import Batch

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

    @functools.cached_property
    def _own(self) -> Samples:
        samples: Samples = cloudpickle.loads(self._pickled)
        return samples

    def __getitems__(self, request: Request) -> Loaded:
        return self._own.__getitems__(request)

    def begin(self, number: int) -> None:
        """Prepare the process of that number."""
        self._own.begin(number)
