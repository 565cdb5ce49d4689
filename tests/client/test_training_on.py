"""Training that goes on: calls of `train` one after the other, and the same as one; on functions that are threads."""

import contextlib
import functools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcpipe import DataError, FuncPipe, ModelError, PlanError, export
from funcpipe.client.follow.callbacks import EachStep
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.client.prepare.session import Session, Site, session_on
from funcpipe.core import FaultTolerance, Plan, RunSettings, Validation
from funcpipe.errors import RunUnknown
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.signing import signed
from funcpipe.testing.faults import ClientKilled
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from tests.e2e.plans import even_plan
from tests.e2e.small import data

QUICK = FaultTolerance(heartbeat_s=0.2, lease_s=30.0, checkpoint_steps=3)
STEPS = 4
"""Of an epoch."""


class Counting(nn.Module):
    """Adds what depends on how many batches it has seen, which a `state_dict` does not tell."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1.0
        return x + 0.01 * self.seen


def model(*, counting: bool = False) -> nn.Module:
    torch.manual_seed(5)
    between = Counting() if counting else nn.Dropout(0.2)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), between, nn.Tanh(), nn.Linear(8, 3))


@functools.cache
def plan(*, replicas: int = 2) -> Plan:
    own = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Identity(), nn.Tanh(), nn.Linear(8, 3))
    return even_plan(own, (torch.zeros(4, 4),), stages=2, replicas=replicas, micro_batch=4, micro_batches=2)


def samples() -> list[tuple[Tensor, Tensor]]:
    """Four steps, of which the last is short."""
    return data()[:60]


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch, storage: MemoryStorage) -> Iterator[ThreadPlatform]:
    """Functions are threads, of any platform that is asked for; the storage lasts."""
    functions = ThreadPlatform(load_spec("local"), storage)

    @contextlib.contextmanager
    def opened(platform: str, like: object, settings: RunSettings, *, silent: bool = False) -> Iterator[Session]:
        session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
        yield Session(**{**{name: getattr(session, name) for name in Session.__dataclass_fields__}, "lasts": True})

    monkeypatch.setattr("funcpipe.api.training.open_session", opened)
    with one_at_a_time():
        yield functions
    functions.stop_all()


def pipe(*, counting: bool = False) -> FuncPipe:
    return FuncPipe(model(counting=counting), loss_fn=F.cross_entropy, optimizer=partial(torch.optim.Adam, lr=0.01))


def train(own: FuncPipe, **options: Any) -> RunResult:
    replicas = options.pop("replicas", 2)
    return own.train(samples, plan=plan(replicas=replicas), faults=QUICK, **options)


def assert_same(one: FuncPipe, other: FuncPipe) -> None:
    found, expected = one.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.fixture(scope="module")
def at_once() -> Iterator[tuple[FuncPipe, RunResult]]:
    """Three epochs in one call."""
    storage = MemoryStorage()
    functions = ThreadPlatform(load_spec("local"), storage)

    @contextlib.contextmanager
    def opened(*_: object, **__: object) -> Iterator[Session]:
        yield session_on(Site(functions, storage, "memory://"), reopen=functions.open)

    with pytest.MonkeyPatch.context() as patch, one_at_a_time():
        patch.setattr("funcpipe.api.training.open_session", opened)
        own = pipe()
        result = train(own, epochs=3)
    yield own, result
    functions.stop_all()


def test_one_epoch_three_times_gives_the_bits_of_three_epochs(
    at_once: tuple[FuncPipe, RunResult], storage: MemoryStorage
) -> None:
    expected, result = at_once
    own, seen = pipe(), list[Progress]()
    results = [train(own, epochs=1, callbacks=[EachStep(seen.append)]) for _ in range(3)]
    assert [loss for one in results for loss in one.losses] == list(result.losses)
    assert [progress.step for progress in seen] == list(range(1, 3 * STEPS + 1))
    assert_same(own, expected)
    last = newest_record(signed(storage), results[-1].run)
    assert (last.began_step, last.first_step, last.steps, last.losses) == (2 * STEPS, 2 * STEPS, 3 * STEPS, ())
    found = export(results[-1].run, storage=storage)
    assert all(torch.equal(tensor, found[name]) for name, tensor in own.model.state_dict().items())


def one(output: Tensor, target: Tensor) -> float:
    """A metric that never gets better."""
    return 1.0


def test_training_goes_on_where_a_validation_has_ended_it(at_once: tuple[FuncPipe, RunResult]) -> None:
    expected, result = at_once
    own = pipe()
    first = train(own, epochs=5, validation=Validation(data=samples, metrics={"one": one}, monitor="one", patience=1))
    assert len(first.losses) == 2 * STEPS
    second = train(own, epochs=1, validation=samples)
    assert (*first.losses, *second.losses) == result.losses
    assert [report.step for report in (*first.validations, *second.validations)] == [STEPS, 2 * STEPS, 3 * STEPS]
    assert_same(own, expected)


def test_other_cuts_take_the_optimiser_over_too(at_once: tuple[FuncPipe, RunResult]) -> None:
    own = pipe()
    train(own, epochs=1)
    other = even_plan(model(), (torch.zeros(4, 4),), stages=1, replicas=1, micro_batch=4, micro_batches=4)
    own.train(samples, plan=other, faults=QUICK, epochs=2)
    expected = at_once[0].model.state_dict()
    assert all(torch.allclose(t, expected[name], atol=1e-5) for name, t in own.model.state_dict().items())


def test_a_call_that_goes_on_can_be_ended_and_resumed(
    at_once: tuple[FuncPipe, RunResult], storage: MemoryStorage
) -> None:
    own = pipe()
    first = train(own, epochs=1)
    before = {name: tensor.clone() for name, tensor in own.model.state_dict().items()}

    def end(progress: Progress) -> None:
        if progress.step == 2 * STEPS:
            raise ClientKilled

    with pytest.raises(ClientKilled):
        train(own, epochs=2, run="second", callbacks=[EachStep(end)])
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.model.state_dict().items())
    with pytest.raises(RunUnknown, match="went on with an optimiser that had done 4 steps, which is kept with no run"):
        train(own, epochs=3, resume="second", from_start=True)
    result = train(pipe(), epochs=3, resume="second")  # as from another process, which knows nothing of the first call
    assert first.losses + result.losses == at_once[1].losses
    result = train(own, epochs=3, resume="second")
    assert first.losses + result.losses == at_once[1].losses
    assert_same(own, at_once[0])


def test_a_finished_run_goes_on_for_more_epochs(at_once: tuple[FuncPipe, RunResult]) -> None:
    train(pipe(), epochs=1, run="longer")
    own = pipe()
    result = train(own, epochs=3, resume="longer")
    assert result.losses == at_once[1].losses
    assert_same(own, at_once[0])


def test_buffers_that_a_state_dict_leaves_out_go_on_too() -> None:
    one, three = pipe(counting=True), pipe(counting=True)
    for _ in range(3):
        train(one, epochs=1, replicas=1)
    train(three, epochs=3, replicas=1)
    assert_same(one, three)
    seen = dict(three.model.named_buffers())["2.seen"]
    assert seen > 0
    assert torch.equal(dict(one.model.named_buffers())["2.seen"], seen)


def test_after_reset_the_optimiser_and_the_epochs_begin_anew() -> None:
    own, other = pipe(), pipe()
    first = train(own, epochs=1)
    own.reset()
    other.model.load_state_dict(first.state_dict())
    train(own, epochs=1)
    train(other, epochs=1)
    assert_same(own, other)


def test_weights_are_those_of_the_module_whatever_was_trained_before() -> None:
    own = pipe()
    train(own, epochs=1)
    with torch.no_grad():
        for parameter in own.model.parameters():
            parameter.zero_()
    kept = train(own, epochs=1, run="zeros")
    assert kept.losses[0] == pytest.approx(math.log(3), rel=1e-3)


def test_a_module_that_has_changed_is_told_to_begin_anew() -> None:
    own = pipe()
    train(own, epochs=1)
    own.model[4] = nn.Linear(8, 5)  # type: ignore[operator]
    with pytest.raises(PlanError, match=r"'4.weight' has shape \[3, 8\].*call reset\(\) to begin with a new optimiser"):
        train(own, epochs=1)
    own.reset()
    assert len(train(own, epochs=1).losses) == STEPS


def test_weights_of_a_run_are_loaded_into_a_module_of_the_same_kind(storage: MemoryStorage) -> None:
    trained, fresh = pipe(), pipe()
    train(trained, epochs=1, run="saved")
    assert fresh.load("saved", storage=storage) == STEPS
    assert_same(fresh, trained)
    other = FuncPipe(nn.Linear(4, 3), optimizer=torch.optim.Adam)
    with pytest.raises(ModelError, match=r"run saved trained another model: the model has no '0\.weight'"):
        other.load("saved", storage=storage)
    wider = FuncPipe(model(), optimizer=torch.optim.Adam)
    wider.model[0] = nn.Linear(5, 8, bias=False)  # type: ignore[operator]
    with pytest.raises(ModelError, match=r"'0.weight' has shape \[8, 4\] there, \[8, 5\] here"):
        wider.load("saved", storage=storage)


def test_mistakes_are_found_before_anything_is_written_unless_that_is_not_wanted(storage: MemoryStorage) -> None:
    own = FuncPipe(model(), loss_fn=partial(F.cross_entropy, reduction="sum"), optimizer=torch.optim.Adam)
    with pytest.raises(DataError, match="the loss is a sum over samples"):
        train(own)
    assert storage.list("") == ()
    assert len(train(own, rehearse=False).losses) == STEPS
