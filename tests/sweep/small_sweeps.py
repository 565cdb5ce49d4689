"""Sweeps of a small model whose functions are threads, and the same trainings in one process."""

import contextlib
import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from funcpipe.api import FuncPipe
from funcpipe.client.prepare.session import Session, Site, session_on
from funcpipe.core import FaultTolerance, Plan, PlatformSpec
from funcpipe.platforms.base import Platform
from funcpipe.platforms.catalog import load_spec
from funcpipe.sweep.sweep import Sweep
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from tests.e2e.plans import even_plan

STEADY = FaultTolerance(heartbeat_s=0.2, lease_s=30.0, checkpoint_steps=1)
SAMPLES, BATCH = 32, 8
STEPS = SAMPLES // BATCH


def points(seed: int, count: int = SAMPLES) -> TensorDataset:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.argmax(1))


TRAINED_ON, HELD_OUT = points(1), points(2, 12)


def network() -> nn.Module:
    """The same for all: functions that are threads draw from the generator that its parameters would be drawn from."""
    return copy.deepcopy(_network())


@functools.cache
def _network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))


def make(trial: optuna.Trial) -> FuncPipe:
    rate, momentum = trial.suggest_float("lr", 1e-3, 1.0, log=True), trial.suggest_float("momentum", 0.0, 0.9)
    return pipe_of(network(), rate, momentum)


def pipe_of(model: nn.Module, rate: float, momentum: float) -> FuncPipe:
    return FuncPipe(model, loss_fn=F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=rate, momentum=momentum))


def plan(stages: int = 1) -> Plan:
    return even_plan(
        network(), (TRAINED_ON.tensors[0][:BATCH],), stages=stages, replicas=1, micro_batch=BATCH, micro_batches=1
    )


def sweep(made: Callable[[Any], Any] = make, *, stages: int = 1, **settings: Any) -> Sweep:
    given = {"data": TRAINED_ON, "validation": HELD_OUT, "epochs": 2, "shuffle": False, "plan": plan(stages)}
    given |= {"sampler": optuna.samplers.RandomSampler(seed=3)}
    return Sweep(made, **{**given, **settings})


def trained(rate: float, momentum: float, *, epochs: int = 2, data: TensorDataset = TRAINED_ON) -> list[float]:
    """The losses of all validations, as one process has them."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    found = []
    for _ in range(epochs):
        for start in range(0, SAMPLES, BATCH):
            inputs, targets = data[start : start + BATCH]
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        found.append(validated(model))
    return found


def validated(model: nn.Module) -> float:
    inputs, targets = HELD_OUT.tensors
    with torch.no_grad():
        return F.cross_entropy(copy.deepcopy(model).eval()(inputs), targets).item()


PRICED = dataclasses.replace(
    load_spec("local"),
    sizes=tuple(dataclasses.replace(size, price_usd_s=0.0) for size in load_spec("local").sizes),
    price_put_usd=0.0,
    price_get_usd=0.0,
    price_invocation_usd=1.0,
    shared_cores=2,
)
"""Each function costs a dollar, and nothing else does anything."""


class Threads:
    """Functions that are threads, in one storage; those of some runs can be held before a step."""

    def __init__(self, spec: PlatformSpec = PRICED) -> None:
        self.storage = MemoryStorage()
        self.held: dict[str, int] = {}
        self.started: list[str] = []
        self.platform = _Platform(spec, self)
        self.sessions = 0

    @contextlib.contextmanager
    def open_session(self, *_: object, **__: object) -> Iterator[Session]:
        self.sessions += 1
        session = session_on(Site(self.platform, self.storage, "memory://"), reopen=self._reopened)
        yield dataclasses.replace(session, lasts=True)

    def bundles(self) -> list[str]:
        return [key for key in self.storage.list("") if key.endswith(".bundle") and "/stage/" in key]

    def of_runs(self) -> set[str]:
        """The runs of which objects are left."""
        return {key.partition("/")[0] for key in self.storage.list("")}

    def _reopened(self, url: str) -> Platform:
        return self.platform.open(url)


class _Platform(ThreadPlatform):
    def __init__(self, spec: PlatformSpec, threads: Threads) -> None:
        super().__init__(spec, threads.storage, faults_of=lambda number: _Held(threads))
        self._threads = threads

    def invoke(self, worker: Any) -> Any:
        self._threads.started.append(worker.run)
        return super().invoke(worker)


class _Held(FunctionFaults):
    """A function that writes the report of no step from the one on at which its run is held, until it is ended."""

    def __init__(self, threads: Threads) -> None:
        super().__init__()
        self._threads = threads

    def next(self, written: str = "") -> int:
        found = re.match(r"([^/]+)/g[^/]+/steps/(\d{8})", written)
        if found and int(found[2]) >= self._threads.held.get(found[1], 1 << 30):
            self.dead.wait()
        return super().next(written)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    made = Threads()
    monkeypatch.setattr("funcpipe.sweep.sweep.open_session", made.open_session)
    monkeypatch.setattr("funcpipe.sweep.sweep.load_spec", lambda name: made.platform.spec)
    with one_at_a_time():
        yield made
        made.platform.stop_all()


def training_data() -> TensorDataset:
    return TRAINED_ON


def validation_data() -> TensorDataset:
    return HELD_OUT
