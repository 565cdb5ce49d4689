"""What each function of a run reads of a dataset: runs whose functions are threads, and a record of their reads."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import Progress, RunResult, ignore_progress
from funcpipe.client.prepare.job import Job, Learner, SampleOrder, make_job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import MB, FaultTolerance, OptimizerKind, Plan, RunSettings, ScheduleKind, Sync, Wire
from funcpipe.errors import PlatformError
from funcpipe.model.graph import trace
from funcpipe.platforms.base import OPEN, Gate, OpenStorage, Platform, RequestMeter, Storage
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.platforms.wrappers import RETRY_S
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from funcpipe.training.data import MapDataset
from funcpipe.training.recipe import Recipe
from tests.support.plans import even_stages
from tests.support.shard_files import CLASSES, WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What one function, or the client, has read: how often and how many bytes, by key."""

    requests: Counter[str]
    bytes_by_key: Counter[str]

    @property
    def bytes(self) -> int:
        """All bytes."""
        return self.bytes_by_key.total()


@dataclass(frozen=True)
class RecordReads:
    """Opens storages by `opened`, and writes down in `folder` what is read, in a file for each function.

    A function is the thread that opens the storage, whose name ends with that of its worker. Can be pickled.
    """

    folder: Path
    opened: OpenStorage = open_storage

    def __call__(
        self,
        url: str,
        *,
        retry_s: float = RETRY_S,
        first_s: float | None = None,
        meter: RequestMeter | None = None,
        crowd_s: float | None = None,
    ) -> Storage:
        """The storage at `url`."""
        store = self.opened(url, retry_s=retry_s, meter=meter)
        return _Recorded(store, self.folder / threading.current_thread().name.rpartition(" ")[2])

    def reads(self) -> dict[str, Reads]:
        """What each has read."""
        return {path.name: _parsed(path) for path in sorted(self.folder.iterdir())}


class _Recorded:
    """A storage that writes down each get."""

    watches = False

    def __init__(self, store: Storage, path: Path) -> None:
        self._store, self._path = store, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        data = self._store.get(key, start=start, stop=stop, gate=gate)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{len(data)} {key}\n")
        return data


def _parsed(path: Path) -> Reads:
    requests, sizes = Counter[str](), Counter[str]()
    for line in path.read_text(encoding="utf-8").splitlines():
        size, _, key = line.partition(" ")
        requests[key] += 1
        sizes[key] += int(size)
    return Reads(requests=requests, bytes_by_key=sizes)


def small_model(width: int = WIDTH) -> nn.Sequential:
    """A model of samples of `tests.support.shard_files`, in double precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    return model.double()


def data_job(
    dataset: str | Callable[[], MapDataset], *, width: int = WIDTH, replicas: int = 2, micro_batch: int = 4
) -> tuple[nn.Module, Job]:
    """The small model, and the job of one epoch of it over two stages, with two micro-batches for each replica."""
    model = small_model(width)
    names = [layer.name for layer in trace(model, (torch.zeros(micro_batch, width, dtype=torch.float64),)).layers]
    plan = Plan(
        global_batch=2 * replicas * micro_batch,
        micro_batch=micro_batch,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        optimizer=OptimizerKind.SGD,
        platform="local",
        stages=even_stages(names, 2),
    )
    recipe = Recipe(loss=nn.functional.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1))
    return model, make_job(Learner(model=model, recipe=recipe), dataset, plan, SampleOrder(), RunSettings())


def train_in_threads(
    job: Job,
    storage: Storage | None = None,
    *,
    settings: RunSettings = RunSettings(),  # noqa: B008  frozen
    on_progress: Callable[[Progress], None] = ignore_progress,
) -> RunResult:
    """The run of `job`, whose functions are threads; its objects lie in `storage`, by default in memory."""
    chosen = storage or MemoryStorage()
    platform = ThreadPlatform(load_spec("local"), chosen)
    session = session_on(Site(platform, chosen, "memory://here"), reopen=_gone)
    faults = FaultTolerance(heartbeat_s=0.05, lease_s=30.0, checkpoint_steps=2, keep=storage is not None)
    try:
        with one_at_a_time():
            return launch(prepare(job, session, faults=faults, settings=settings), on_progress)
    finally:
        platform.stop_all()


def _gone(url: str, *, meter: RequestMeter | None = None) -> Platform:
    """Functions that are threads end with their run: PlatformError."""
    raise PlatformError(f"the threads at {url} have ended")


def shards_of_samples(job: Job, indices: set[int]) -> set[int]:
    """The numbers of the shards that samples of a job's dataset lie in."""
    assert job.shards is not None
    found, first = set[int](), 0
    for number, size in enumerate(job.shards.sizes):
        if any(index in indices for index in range(first, first + size)):
            found.add(number)
        first += size
    return found


def mb(size_bytes: float) -> str:
    """Bytes in megabytes of 2^20, as tables show them."""
    return f"{size_bytes / MB:.2f}"
