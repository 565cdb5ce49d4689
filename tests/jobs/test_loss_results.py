"""What is trained of a loss is returned, written into the user's loss, validated with, continued and loaded."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from funcpipe import EMA, FuncPipe, Validation
from funcpipe.api import training
from funcpipe.client.prepare.session import Session, Site, session_on
from funcpipe.core import FaultTolerance, Plan, ScheduleKind, Sync, Wire
from funcpipe.errors import DataError, ModelError
from funcpipe.model.graph import trace
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from funcpipe.worker import hand_over
from tests.jobs.scripts import SGD
from tests.jobs.test_loss_state import Centre, Margin
from tests.jobs.test_scripts import Residual, vectors
from tests.support.plans import even_stages

STEADY = FaultTolerance(heartbeat_s=0.2, lease_s=30.0, checkpoint_steps=2, keep=True)


@contextlib.contextmanager
def functions(faults: FunctionFaults | None = None) -> Iterator[MemoryStorage]:
    """Runs are functions that are threads; the last stage's first suffers `faults`."""
    storage, chosen = MemoryStorage(), faults or FunctionFaults()
    platform = ThreadPlatform(
        load_spec("local"), storage, faults_of=lambda number: chosen if number == 1 else FunctionFaults()
    )

    @contextlib.contextmanager
    def session(*_: Any, **__: Any) -> Iterator[Session]:
        yield replace(session_on(Site(platform, storage, "memory://"), reopen=platform.open), lasts=True)

    with one_at_a_time(), mock.patch.object(training, "open_session", session):
        yield storage
    platform.stop_all()


def made(loss: type[nn.Module]) -> tuple[Residual, Any]:
    torch.manual_seed(0)
    return Residual(blocks=2), loss()


def plan(micro_batch: int, replicas: int = 1) -> Plan:
    return Plan(
        global_batch=16,
        micro_batch=micro_batch,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        platform="local",
        stages=even_stages([layer.name for layer in trace(Residual(blocks=2), (torch.randn(2, 24),)).layers], 2),
    )


def script(model: nn.Module, loss: nn.Module, *, epochs: int) -> AveragedModel:
    """Train both in one process; returns their average."""
    both = nn.ModuleList([model, loss])
    average = AveragedModel(both, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
    optimizer, samples = SGD([*model.parameters(), *loss.parameters()]), vectors(40)
    for _ in range(epochs):
        for start in range(0, 40, 16):
            x, y = map(torch.stack, zip(*samples[start : start + 16], strict=True))
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            average.update_parameters(both)
    return average


def same(found: Mapping[str, Tensor], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.allclose(tensor, expected[name], atol=1e-5), name


def value(model: nn.Module, loss: nn.Module) -> float:
    """The mean loss over the data in eval mode."""
    x, y = map(torch.stack, zip(*vectors(40), strict=True))
    with torch.no_grad():
        return float(loss.eval()(model.eval()(x), y))


@pytest.mark.parametrize(("kind", "micro_batch", "replicas"), [(Margin, 4, 2), (Centre, 16, 1)])
def test_a_loss_is_trained_on_and_returned(
    kind: type[nn.Module], micro_batch: int, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loss = made(kind)
    chosen = plan(micro_batch, replicas)
    pipe = FuncPipe(model, loss_fn=loss, optimizer=SGD, average=EMA(decay=0.5))
    faults = FunctionFaults(killed_writing=("checkpoints/", 1)) if kind is Margin else None
    with functions(faults) as storage:
        pipe.train(vectors(40), plan=chosen, shuffle=False, faults=STEADY, progress=False)
        with monkeypatch.context() as patch:
            patch.setattr(hand_over, "leaves_at_s", lambda *_: 0.0)  # after one step each
            result = pipe.train(
                vectors(40),
                plan=chosen,
                shuffle=False,
                faults=FaultTolerance(heartbeat_s=0.2, lease_s=30.0, keep=True, lifetime_s=600.0),
                validation=Validation(data=vectors(40), keep_best=True),
                progress=False,
                run="second",
            )
        again, other = made(kind)
        assert FuncPipe(again, loss_fn=other).load("second", storage=storage) == 6
    expected, expected_loss = made(kind)
    averaged = script(expected, expected_loss, epochs=2)
    same(result.state_dict(), expected.state_dict())
    same(result.loss_state_dict(), expected_loss.state_dict())
    same(loss.state_dict(), expected_loss.state_dict())
    same(other.state_dict(), expected_loss.state_dict())
    same(dict(result.loss.best), expected_loss.state_dict())
    if kind is Centre:
        assert loss.calls == other.calls == 6
        assert result.attributes == {}
    else:
        same(dict(result.loss.averaged), averaged.module[1].state_dict())  # type: ignore[index]
    assert result.validations[-1].values["val_loss"] == pytest.approx(value(expected, expected_loss), rel=1e-4)


class Always(Centre):
    """Its calls change its state in eval mode too."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(output, target)


def test_a_loss_that_changes_in_eval_mode_is_refused_with_a_validation() -> None:
    model, loss = made(Always)
    pipe = FuncPipe(model, loss_fn=loss, optimizer=SGD)
    with (
        functions(),
        pytest.raises(DataError, match=r"in eval mode leaves calls for .* only where self.training is set"),
    ):
        pipe.train(vectors(40), plan=plan(16), validation=vectors(8), progress=False)


def test_what_was_trained_of_another_loss_is_not_loaded() -> None:
    model, loss = made(Margin)
    with functions() as storage:
        FuncPipe(model, loss_fn=loss, optimizer=SGD).train(vectors(16), plan=plan(16), progress=False, run="run-1")
        for other, said in (
            (nn.CrossEntropyLoss(), "the loss has no 'centres'"),
            (Centre(), "the loss has no 'centres'"),
            (Margin(centres=4), "'centres' has shape"),
        ):
            with pytest.raises(ModelError, match=f"run run-1 trained another loss: {said}"):
                FuncPipe(Residual(blocks=2), loss_fn=other).load("run-1", storage=storage)
