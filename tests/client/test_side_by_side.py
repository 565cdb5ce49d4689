"""Jobs from several threads of a program: they are tried in turn, and run side by side, with the bits of one alone."""

import contextlib
import copy
import importlib
import queue
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from funcpipe.api import FuncPipe
from funcpipe.client.prepare.job import Job, Learner, SampleOrder, make_job
from funcpipe.client.prepare.session import Session, Site, session_on
from funcpipe.core import MB, FaultTolerance, RunSettings
from funcpipe.core.backoff import Backoff
from funcpipe.errors import ModelError
from funcpipe.model.graph import trace
from funcpipe.model.graph.isolation import in_turn
from funcpipe.platforms.catalog import load_spec
from funcpipe.profiler.measure import Loss, Timing, local_timer
from funcpipe.profiler.profile import profile
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from funcpipe.training.recipe import Recipe
from tests.e2e.plans import even_plan, momentum

RATES = [0.01 * 2**i for i in range(8)]
STEADY = FaultTolerance(heartbeat_s=0.2, lease_s=30.0)
INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(INPUTS, INPUTS.argmax(1))


def drawing() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions are threads; each run has a storage and a platform of its own."""

    @contextlib.contextmanager
    def opened(*_: object, **__: object) -> Iterator[Session]:
        storage = MemoryStorage()
        functions = ThreadPlatform(load_spec("local"), storage)
        yield session_on(Site(functions, storage, "memory://"), reopen=functions.open)
        functions.stop_all()

    monkeypatch.setattr("funcpipe.api.training.open_session", opened)
    monkeypatch.setattr(importlib.import_module("funcpipe.profiler.profile"), "base_memory_bytes", lambda **_: 200 * MB)
    with one_at_a_time():
        yield


def trained(model: nn.Module, rate: float) -> tuple[tuple[float, ...], dict[str, Tensor], float]:
    """What a whole job leaves: losses, tensors, and the accuracy by plain PyTorch, while others are tried."""
    pipe = FuncPipe(model, loss_fn=F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=rate, momentum=0.9))
    pipe.profile(INPUTS[:8], platform="local", micro_batch=8, repeats=1)
    pipe.optimize(global_batch=16)
    result = pipe.train(DATA, epochs=2, progress=False, faults=STEADY)
    with torch.no_grad():
        right = (model.eval()(INPUTS).argmax(1) == DATA.tensors[1]).double().mean().item()
    return result.losses, dict(result.state_dict()), right


@pytest.mark.usefixtures("threads")
def test_eight_learning_rates_over_eight_threads_leave_what_they_leave_one_after_the_other() -> None:
    models = [drawing() for _ in RATES]
    with ThreadPoolExecutor(len(RATES)) as pool:
        together = list(pool.map(trained, copy.deepcopy(models), RATES))
    for found, model, rate in zip(together, models, RATES, strict=True):
        losses, tensors, right = trained(model, rate)
        assert found[0] == losses
        assert found[2] == right
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in found[1].items())
    assert len({losses for losses, _, _ in together}) == len(RATES)


def waits(act: Callable[[], object], *, patience_s: float) -> bool:
    """Whether `act` waits in another thread for the turn that this one has, as far as that shows in so long."""
    began, done = threading.Event(), threading.Event()

    def run() -> None:
        began.set()
        act()
        done.set()

    with in_turn():
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert began.wait(60)
        waited = not done.wait(patience_s)
    thread.join(60)
    assert done.is_set()
    return waited


@pytest.mark.usefixtures("threads")
def test_what_is_tried_waits_for_its_turn_and_nothing_else_does() -> None:
    model = drawing()
    plan = even_plan(model, (INPUTS[:2],), stages=1, replicas=1, micro_batch=2, micro_batches=2)
    learner = Learner(model=model, recipe=Recipe(loss=F.cross_entropy, optimizer=momentum))

    def job() -> Job:
        return make_job(learner, DATA, plan, SampleOrder(), RunSettings())

    for act in (lambda: FuncPipe(model, optimizer=momentum), lambda: trace(model, (INPUTS[:2],)), job):
        assert waits(act, patience_s=0.1)
    assert not waits(lambda: model(INPUTS), patience_s=60)


def test_functions_that_measure_layers_are_waited_for_by_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("funcpipe.profiler.profile"), "base_memory_bytes", lambda **_: 200 * MB)
    spec, free = load_spec("local"), []
    graph = trace(drawing(), (INPUTS[:2],))

    def measure(stage: Any, values: Mapping[str, Tensor], loss: Loss | None, repeats: int) -> Timing:
        def take() -> None:
            with in_turn():
                free.append(True)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        thread.join(60)
        return local_timer(spec)(stage, values, loss, repeats)

    profile(graph, (INPUTS[:2],), spec=spec, micro_batch=2, repeats=1, on=measure)
    assert free


DISTURBANCES: queue.SimpleQueue[None] = queue.SimpleQueue()


class Disturbed(nn.Module):
    """Draws, and has another thread draw meanwhile, as long as there are disturbances left."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        disturb()
        return F.dropout(self.linear(x), 0.5)


def disturb() -> None:
    with contextlib.suppress(queue.Empty):
        DISTURBANCES.get_nowait()
        thread = threading.Thread(target=torch.rand, args=(DISTURBANCES.qsize() % 7 + 1,))
        thread.start()
        thread.join()


def test_a_model_is_not_refused_for_what_other_threads_draw() -> None:
    def traced(disturbances: int) -> int:
        for _ in range(disturbances):
            DISTURBANCES.put(None)
        try:
            trace(Disturbed(), (INPUTS[:2],))
            return DISTURBANCES.qsize()
        finally:
            while not DISTURBANCES.empty():
                DISTURBANCES.get_nowait()

    with pytest.raises(ModelError, match="Disturbed gives different results for the same inputs and seeds"):
        traced(1000)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(traced, 5).result(60) == 0
        with pytest.raises(ModelError, match="Disturbed gives different results for the same inputs and seeds"):
            pool.submit(traced, 1000).result(60)


def test_pauses_are_not_drawn_from_the_numbers_that_a_program_seeds() -> None:
    before = random.getstate()
    assert len({Backoff(first_s=1.0, most_s=2.0).pause_s(1) for _ in range(3)}) > 1
    assert random.getstate() == before
