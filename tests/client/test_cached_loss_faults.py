"""Whole runs with a loss of the whole batch: killed and handed over, they keep the bits of a quiet one."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.core import Coupled, Interval, Outcome, ScheduleKind
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.output_cache import OutputCache
from funcpipe.worker import hand_over
from tests.client.test_learning import STEADY, halted, job, run, tensors_of
from tests.training.learning import BATCHES, EPOCHS, by_name, data, difference, network


class Contrast(nn.Module):
    """Each sample against all others, with a temperature that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        rows = F.normalize(output, dim=1)
        similar = rows @ rows.T / self.log.exp()
        others, pairs = similar - 1e9 * torch.eye(len(rows)), torch.arange(len(rows)).roll(1)
        return F.cross_entropy(others, pairs) + output.var(0).sum()


def cached(stages: int = 2, replicas: int = 2) -> Job:
    made = job(stages, replicas, loss=Contrast(), coupled=Coupled.CACHE)
    return replace(made, plan=replace(made.plan, schedule=ScheduleKind.GPIPE, joint_loss=True))


def scripted() -> tuple[dict[str, Tensor], Tensor]:
    """The model and the temperature after torch's own loop on whole batches."""
    model, loss, samples = network(), Contrast(), data()
    optimizer = by_name([*model.named_parameters(), *loss.named_parameters()])
    for step in BATCHES.steps_from(0, EPOCHS):
        indices = [index for micro_batch in step.micro_batches for index in micro_batch]
        x, y = (torch.stack([samples[i][side] for i in indices]) for side in (0, 1))
        optimizer.zero_grad()
        torch.autograd.backward(loss(model(x), y))
        optimizer.step()
    return model.state_dict(), loss.log.detach()


def all_of(result: RunResult) -> dict[str, Tensor]:
    return {**tensors_of(result), **result.loss_state_dict()}


@functools.cache
def quiet() -> dict[str, Tensor]:
    return all_of(run(cached()))


def test_a_quiet_run_equals_torch_s_own_loop_on_whole_batches() -> None:
    made = cached(stages=3)
    made = replace(made, recipe=replace(made.recipe, scheduler=None, average=None, scheduler_interval=Interval.EPOCH))
    found, (model, log) = run(made), scripted()
    assert difference(found.state_dict(), model) < 1e-12
    assert float((found.loss_state_dict()["log"] - log).abs()) < 1e-12


def killed(number: int, writing: tuple[str, int]) -> RunResult:
    """A run of which that function dies before it writes the nth object with that name."""
    storage = MemoryStorage()
    faulty = FunctionFaults(killed_writing=writing)
    platform = ThreadPlatform(
        load_spec("local"), storage, faults_of=lambda started: faulty if started == number else FunctionFaults()
    )
    return run(cached(), platform=platform, storage=storage)


@pytest.mark.parametrize(
    ("number", "writing"),
    [
        (2, ("put-outputs", 3)),  # others wait for its outputs
        (3, ("put-merged", 4)),  # others have used them
        (2, ("/checkpoints/s1/", 3)),
        (1, ("put-activation", 9)),
    ],
)
def test_a_killed_function_costs_no_bit(number: int, writing: tuple[str, int]) -> None:
    result = killed(number, writing)
    assert result.bill.functions > 4
    assert difference(all_of(result), quiet()) == 0


def test_hand_overs_cost_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "leaves_at_s", lambda *_: 0.0)  # after one step each
    result = run(cached(), replace(STEADY, lifetime_s=600.0))
    assert sum(report.outcome is Outcome.HANDED_OVER for report in result.workers) == 4 * (len(result.losses) - 1)
    assert difference(all_of(result), quiet()) == 0


@pytest.mark.parametrize(("stages", "replicas", "tolerance"), [(2, 2, 0.0), (3, 1, 1e-12), (1, 4, 1e-12)])
def test_a_run_is_resumed_by_another_plan(stages: int, replicas: int, tolerance: float) -> None:
    before, storage = halted(cached())
    result = run(cached(stages, replicas), storage=storage, before=before)
    assert difference(all_of(result), quiet()) <= tolerance


def test_outputs_that_were_put_are_used_again_where_an_attempt_computes_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor may round otherwise; the other replicas have used what was put."""
    expected, seen, repeated, keep = quiet(), set[tuple[int, int]](), [], OutputCache.keep

    def otherwise(self: OutputCache, micro_batch: int, output: Tensor, target: Tensor) -> None:
        place = self._step.number, micro_batch
        if place in seen:
            repeated.append(place)
            output = output + 1e-3
        seen.add(place)
        keep(self, micro_batch, output, target)

    monkeypatch.setattr(OutputCache, "keep", otherwise)
    assert difference(all_of(killed(3, ("put-merged", 4))), expected) == 0
    assert repeated
