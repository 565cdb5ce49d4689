"""Models that are evaluated, or predict, without training: equal to one process in eval mode."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from funcpipe import FuncPipe
from funcpipe.analysis.predict import mean_step_s, predict
from funcpipe.api import evaluating
from funcpipe.api.evaluating import EvaluationResult
from funcpipe.client.prepare.session import Session, Site, session_on
from funcpipe.core import ModelProfile, Plan
from funcpipe.errors import DataError, PlanError
from funcpipe.partitioner.problem.goal import forward_only
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from funcpipe.worker import hand_over
from tests.client import validated
from tests.client.validated import STEADY, error_rate, held_out, mean_loss, net


@functools.cache
def plan() -> Plan:
    return validated.plan(net())


@contextlib.contextmanager
def functions(faults: FunctionFaults | None = None) -> Iterator[MemoryStorage]:
    """Runs are functions that are threads; the last stage's first suffers `faults`."""
    storage, chosen = MemoryStorage(), faults or FunctionFaults()
    platform = ThreadPlatform(
        load_spec("local"), storage, faults_of=lambda number: chosen if number == 2 else FunctionFaults()
    )

    @contextlib.contextmanager
    def session(*_: Any) -> Iterator[Session]:
        yield session_on(Site(platform, storage, "memory://"), reopen=platform.open)

    with one_at_a_time(), mock.patch.object(evaluating, "open_session", session):
        yield storage
    platform.stop_all()


def pipe(model: nn.Module | None = None, **keywords: Any) -> FuncPipe:
    return FuncPipe(model or net(), loss_fn=nn.functional.cross_entropy, **keywords)


def evaluated(faults: FunctionFaults | None = None, count: int = 30) -> EvaluationResult:
    plan()
    with functions(faults) as storage:
        found = pipe().evaluate(
            lambda: validated.samples(count, 4),
            metrics={"error": error_rate},
            plan=plan(),
            faults=dataclasses.replace(STEADY, keep=False),
        )
        assert storage.list("") == ()
    return found


@functools.cache
def undisturbed() -> EvaluationResult:
    """Of 30 samples."""
    return evaluated()


def test_an_evaluation_equals_one_process_and_needs_no_optimizer() -> None:
    found, data = undisturbed(), validated.samples(30, 4)
    assert found.samples == 30
    assert found.loss == pytest.approx(mean_loss(net(), net().state_dict(), data), abs=1e-12)
    wrong = [
        int((output.argmax(1) != target).sum())
        for output, target in validated.evaluated(net(), net().state_dict(), data)
    ]
    assert found.metrics == {"error": pytest.approx(sum(wrong) / 30, abs=1e-12)}
    assert found.bill.functions == 4


@pytest.mark.parametrize("writing", [("scores/", 2), ("validations/", 1)])
def test_a_function_that_is_killed_in_an_evaluation_changes_no_bit(writing: tuple[str, int]) -> None:
    faults = FunctionFaults(killed_writing=writing)
    found = evaluated(faults)
    assert faults.dead.is_set()
    assert (found.loss, found.metrics) == (undisturbed().loss, undisturbed().metrics)


def test_an_evaluation_that_outlives_its_functions_goes_on_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    plan()
    with functions(), monkeypatch.context() as patch:
        patch.setattr(hand_over, "leaves_at_s", lambda *_: 0.0)  # after one batch each
        short = dataclasses.replace(STEADY, keep=False, lifetime_s=600.0)
        many = pipe().evaluate(lambda: validated.samples(60, 4), plan=plan(), faults=short)
    assert many.bill.functions > 4
    assert many.loss == evaluated(count=60).loss


class Two(nn.Module):
    """Returns two tensors by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The logits, and their sums."""
        logits = self.net(x)
        return {"logits": logits, "total": logits.sum(1)}


def test_an_evaluation_computes_in_the_precision_of_the_model() -> None:
    data = [(x.float(), y) for x, y in validated.samples(8, 4)]
    found = {}
    for precision in ("fp32", "bf16"):
        own = pipe(net().float(), precision=precision)
        with functions():
            found[precision] = own.evaluate(data, plan=plan(), faults=dataclasses.replace(STEADY, keep=False)).loss
    with torch.autocast("cpu", torch.bfloat16):
        expected = mean_loss(net().float(), net().float().state_dict(), data)
    assert found["bf16"] == pytest.approx(expected, abs=1e-6)
    assert found["fp32"] != pytest.approx(expected, abs=1e-6)


def test_predictions_are_the_outputs_of_one_process_in_the_order_of_the_samples() -> None:
    plan()
    with functions():
        found = pipe().predict(held_out, plan=plan(), faults=dataclasses.replace(STEADY, keep=False))
    outputs = [output for output, _ in validated.evaluated(net(), net().state_dict(), held_out())]
    assert found.keys() == {"output"}
    assert torch.equal(found["output"], torch.cat(outputs))


def test_outputs_of_several_tensors_are_predicted_by_name() -> None:
    own = validated.plan(Two(), stages=2, replicas=1)
    with functions():
        found = pipe(Two()).predict(held_out, plan=own, faults=dataclasses.replace(STEADY, keep=False))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "logits": (validated.HELD_OUT, 4),
        "total": (validated.HELD_OUT,),
    }


def test_what_cannot_be_predicted_or_trained_is_refused_with_the_way_out() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            """One number for all samples."""
            mean: Tensor = self.net(x).mean()
            return mean

    own = validated.plan(Mean(), stages=1, replicas=1)
    with functions(), pytest.raises(DataError, match="the model's output output is a tensor of shape"):
        pipe(Mean()).predict(held_out, plan=own)
    with pytest.raises(PlanError, match="the model has no optimizer"):
        pipe().train(held_out, plan=plan())
    with pytest.raises(PlanError, match=r"^the model has no optimizer"):
        pipe().optimize(global_batch=16)
    with pytest.raises(PlanError, match="there is no plan yet; call optimize"):
        pipe().evaluate(held_out)
    with functions(), pytest.raises(DataError, match="a metric fails on the first 2 samples: ValueError: wrong"):
        pipe().evaluate(held_out, plan=plan(), metrics={"bad": failing})
    with functions(), pytest.raises(DataError, match="has no samples"):
        pipe().evaluate(list, plan=plan())


def failing(output: Tensor, target: Tensor) -> Tensor:
    """Fails."""
    raise ValueError("wrong")


@functools.cache
def profile() -> ModelProfile:
    own, target = pipe(optimizer=functools.partial(torch.optim.Adam, lr=0.1)), torch.zeros(4, dtype=torch.long)
    with mock.patch("funcpipe.profiler.profile.base_memory_bytes", return_value=200 << 20):  # or a process measures it
        return own.profile(torch.zeros(4, 6).double(), platform="local", sample_target=target, repeats=1)


def test_a_plan_of_forwards_alone_needs_less_time_and_memory_than_one_for_training() -> None:
    own = pipe(optimizer=functools.partial(torch.optim.Adam, lr=0.1))
    spec = load_spec("local")
    alone = own.optimize_forward(global_batch=16, replicas=(2,), profile=profile(), spec=spec)
    trained = own.optimize(global_batch=16, replicas=(2,), profile=profile(), spec=spec)
    assert alone.estimate is not None
    assert trained.estimate is not None
    assert alone.estimate.iteration_s < trained.estimate.iteration_s
    one, two = forward_only(profile()), profile()
    assert sum(layer.parameter_bytes for layer in one.layers) == 0
    assert sum(layer.constant_bytes for layer in one.layers) == sum(
        layer.constant_bytes + layer.parameter_bytes for layer in two.layers
    )


def test_plans_are_simulated_where_that_is_asked_for() -> None:
    own, spec = pipe(optimizer=functools.partial(torch.optim.Adam, lr=0.1)), load_spec("local")
    plan = own.optimize(global_batch=16, simulated_plans=3, profile=profile(), spec=spec)
    assert plan.solver is not None
    assert plan.solver.simulated_plans in (1, 2, 3)
    assert plan.solver.simulated_s == pytest.approx(predict(plan, profile(), spec).duration_s)


def test_plans_with_local_steps_are_made_where_that_is_asked_for() -> None:
    own, spec = pipe(optimizer=functools.partial(torch.optim.Adam, lr=0.1)), load_spec("local")
    asked: dict[str, Any] = {"global_batch": 16, "replicas": 2, "profile": profile(), "spec": spec}
    plan = own.optimize(sync_every="auto", sync_every_at_most=8, outer_lr=0.7, outer_momentum=0.9, **asked)
    assert (plan.sync_every, plan.outer_lr, plan.outer_momentum) == (8, 0.7, 0.9)
    assert plan.estimate is not None
    assert plan.estimate.meeting_s is not None
    assert predict(plan, profile(), spec).duration_s > mean_step_s(plan, profile(), spec)
    simulated = own.optimize(sync_every=8, sync_fragments=2, sync_delay=3, simulated_plans=2, **asked)
    assert (simulated.sync_fragments, simulated.sync_delay) == (2, 3)
    assert simulated.solver is not None
    assert simulated.solver.simulated_s == pytest.approx(mean_step_s(simulated, profile(), spec))
    assert own.optimize(**asked).sync_every == 1
