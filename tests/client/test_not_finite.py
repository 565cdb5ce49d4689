"""A model that diverges: the run ends and says where, leaves such steps out, or goes on with such numbers."""

import dataclasses
import functools
import json
import math
import re
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.client.control.status import status
from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import Progress, RunResult, ignore_progress
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, OnNan, RunSettings, to_text
from funcpipe.errors import NotFinite, WorkerFailed
from funcpipe.platforms.catalog import load_spec
from funcpipe.show import as_json
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.losses import LossFunction
from funcpipe.training.norms import Finiteness
from funcpipe.training.plain import train_in_one_process
from funcpipe.training.recipe import Recipe
from funcpipe.worker.checkpoint_manager import CheckpointManager
from tests.client.threads import job as quick_job
from tests.support import chaos
from tests.support.waiting import LONG_S

FAULTS = FaultTolerance(heartbeat_s=0.2, lease_s=30.0, checkpoint_steps=1, keep=True)


def not_a_number(output: Tensor, target: Tensor) -> Tensor:
    return output.mean() * math.nan


def infinite(output: Tensor, target: Tensor) -> Tensor:
    return output.sum() * 0 + math.inf


def train(
    functions: ThreadPlatform, storage: MemoryStorage, loss: LossFunction, seen: list[Progress], settings: RunSettings
) -> RunResult:
    recipe = dataclasses.replace(chaos.job().recipe, loss=loss, clip_grad_norm=1.0, on_nan=OnNan.IGNORE)
    job = dataclasses.replace(chaos.job(), recipe=recipe, epochs=2)
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)

    def interrupted(progress: Progress) -> None:
        seen.append(progress)
        if progress.step == 2 and settings.name is not None:
            raise WorkerFailed("here")

    return launch(prepare(job, session, faults=FAULTS, settings=settings), interrupted)


@pytest.mark.parametrize("loss", [not_a_number, infinite])
def test_a_run_whose_loss_is_no_number_is_resumed_and_ends_like_any_other(loss: LossFunction) -> None:
    storage, seen = MemoryStorage(), list[Progress]()
    functions = ThreadPlatform(load_spec("local"), storage)
    with pytest.raises(WorkerFailed, match="here"):
        train(functions, storage, loss, seen, RunSettings(name="run-1"))
    json.loads(to_text(status(storage, "run-1")), parse_constant=pytest.fail)
    result = train(functions, storage, loss, seen, RunSettings(resume="run-1"))
    assert len(result.losses) == 6
    assert not any(math.isfinite(loss) for loss in result.losses)
    assert not any(math.isfinite(progress.loss) for progress in seen)
    json.loads(as_json({"losses": result.losses}), parse_constant=pytest.fail)
    if loss is not_a_number:
        assert all(bool(torch.isnan(tensor).all()) for tensor in result.tensors.values() if tensor.is_floating_point())


BAD = 10
"""A sample with a NaN among its inputs."""


def data_with_a_hole() -> list[tuple[Tensor, Tensor]]:
    made = chaos.data()
    made[BAD][0][2] = math.nan
    return made


def job_with_a_hole(on_nan: OnNan) -> Job:
    recipe = dataclasses.replace(quick_job().recipe, on_nan=on_nan)
    return dataclasses.replace(quick_job(), recipe=recipe, dataset=data_with_a_hole, epochs=2)


def steps_with_the_hole(job: Job) -> list[int]:
    steps = [step for epoch in range(job.epochs) for step in job.batches.epoch(epoch)]
    return [step.number for step in steps if any(BAD in indices for indices in step.micro_batches)]


class World:
    """A storage in memory, and functions that are threads."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.functions = ThreadPlatform(load_spec("local"), self.storage)

    def run(self, job: Job, *, seen: list[Progress] | None = None, resume: bool = False) -> RunResult:
        session = session_on(Site(self.functions, self.storage, "memory://"), reopen=self.functions.open)
        settings = RunSettings(resume="run-1") if resume else RunSettings(name="run-1")
        prepared = prepare(job, session, faults=FAULTS, settings=settings)
        return launch(prepared, ignore_progress if seen is None else seen.append)


def test_a_loss_that_is_no_number_ends_the_run_and_tells_where_and_what_is_saved() -> None:
    job, world = job_with_a_hole(OnNan.STOP), World()
    first = steps_with_the_hole(job)[0]
    with pytest.raises(NotFinite) as caught:
        world.run(job)
    said = str(caught.value)
    assert said.startswith(f"run run-1: in step {first + 1} the loss is nan, first of micro-batch ")
    assert "on_nan='skip'" in said
    assert "found by worker s2.r" in said
    assert first > 0
    assert f"; the newest checkpoint is that after step {first}. " in said
    assert "--resume run-1" in caught.value.__notes__[0]
    found = status(world.storage, "run-1")
    assert found.verdict.value == "failed"
    assert f"in step {first + 1} the loss is nan" in found.explanation
    assert "Traceback" not in said


def test_steps_that_are_no_numbers_are_left_out_by_all_alike_and_a_stopped_run_goes_on_so() -> None:
    job, seen = job_with_a_hole(OnNan.SKIP), list[Progress]()
    result = World().run(job, seen=seen)
    skipped = steps_with_the_hole(job)
    assert list(result.skipped_steps) == skipped
    assert [step for step, loss in enumerate(result.losses) if not math.isfinite(loss)] == skipped
    assert seen[-1].skipped == len(skipped) == 2
    json.loads(as_json(result.losses), parse_constant=pytest.fail)
    plain = train_in_one_process(
        chaos.model(),
        job.graph,
        data_with_a_hole(),
        [step for epoch in range(job.epochs) for step in job.batches.epoch(epoch)],
        recipe=job.recipe,
        seed=job.seed,
    )
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(result.tensors[name], tensor, rtol=1e-5, atol=1e-6)
    world = World()
    with pytest.raises(NotFinite):
        world.run(job_with_a_hole(OnNan.STOP))
    resumed = world.run(job, resume=True)
    assert all(torch.equal(resumed.tensors[name], tensor) for name, tensor in result.tensors.items())
    assert resumed.skipped_steps == result.skipped_steps


def steep(output: Tensor, target: Tensor) -> Tensor:
    """A finite loss whose gradient is not a number."""
    return F.cross_entropy(output, target) + (output * 0).abs().sqrt().sum()


def far(output: Tensor, target: Tensor) -> Tensor:
    """A loss with a gradient that a large learning rate makes infinite parameters of."""
    return output.sum() * 1e20


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Recipe(loss=steep, optimizer=functools.partial(torch.optim.SGD, lr=0.1)), "in step 1 the gradient of "),
        (
            Recipe(loss=steep, optimizer=functools.partial(torch.optim.SGD, lr=0.1), clip_grad_norm=1.0),
            "in step 1 the gradient of ",
        ),
        (Recipe(loss=far, optimizer=functools.partial(torch.optim.SGD, lr=1e30)), "after step 1 the value of "),
    ],
)
def test_gradients_and_parameters_that_are_no_numbers_end_the_run_before_they_are_saved(
    recipe: Recipe, said: str
) -> None:
    with pytest.raises(NotFinite, match=re.escape(said)) as caught:
        World().run(dataclasses.replace(quick_job(), recipe=recipe))
    assert "; nothing is saved from before. " in str(caught.value)


def test_the_same_is_told_when_the_replica_that_saves_is_the_slower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    save, others = CheckpointManager.save, threading.Semaphore(0)

    def late(manager: CheckpointManager, *args: Any, **options: Any) -> None:
        if manager._spec.replica == 0:
            assert others.acquire(timeout=LONG_S)
            save(manager, *args, **options)
            return
        try:
            save(manager, *args, **options)
        finally:
            others.release()

    monkeypatch.setattr(CheckpointManager, "save", late)
    recipe = Recipe(loss=far, optimizer=functools.partial(torch.optim.SGD, lr=1e30))
    with pytest.raises(NotFinite, match="after step 1 the value of "):
        World().run(dataclasses.replace(quick_job(), recipe=recipe))


def test_a_model_may_hold_parameters_that_are_no_numbers_from_the_start() -> None:
    stage = nn.ParameterDict({"mask": torch.tensor([0.0, -math.inf])})
    Finiteness(OnNan.STOP, 0, dict(stage.named_parameters())).check_parameters(3)
    with torch.no_grad():
        other = nn.Linear(2, 2)
        watched = Finiteness(OnNan.SKIP, 1, dict(other.named_parameters()))
        other.bias[1] = math.nan
    with pytest.raises(NotFinite, match="after step 3 the value of bias in stage 1 is not finite"):
        watched.check_parameters(3)
