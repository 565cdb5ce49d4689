"""Runs that are validated, together with all else that a run may be: kept, limited, scheduled, told of."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from funcpipe import Callback, Progress, RunResult, RunSettings, Verdict, export
from funcpipe.client.control.status import status
from funcpipe.client.follow.callbacks import Callbacks
from funcpipe.client.prepare.evaluation import make_evaluation
from funcpipe.client.prepare.job import Job
from funcpipe.core import Validation
from funcpipe.model.graph import trace
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from tests.client import test_learning as learns
from tests.client import validated
from tests.client.validated import RUN, held_out, run
from tests.support.census import Census
from tests.training import learning

BAD_LR = 3.0
"""With this learning rate the loss grows from the first step on."""


@functools.cache
def stopping(patience: int | None = 2) -> Job:
    """Ends early, long before its six epochs."""
    return validated.job(Validation(data=held_out, every_steps=1, patience=patience), epochs=6, lr=BAD_LR)


@pytest.fixture(autouse=True)
def drawing_in_turn() -> Iterator[None]:
    stopping()
    with one_at_a_time():
        yield


def threads(storage: MemoryStorage) -> ThreadPlatform:
    return ThreadPlatform(load_spec("local"), storage)


def same_tensors(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


class Heard(Callback):
    """What a callback hears, in order."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.validations: list[tuple[int, Mapping[str, float]]] = []

    def on_step(self, progress: Progress) -> None:
        """A step."""
        assert progress.validation is None
        self.steps.append(progress.step)

    def on_validation(self, step: int, values: Mapping[str, float]) -> None:
        """A validation, after its step."""
        assert self.steps[-1] == step
        self.validations.append((step, values))

    def check(self, result: RunResult) -> None:
        """All steps and validations were heard of once."""
        assert self.steps == list(range(1, len(result.losses) + 1))
        assert self.validations == [(report.step, report.values) for report in result.validations]


def test_a_run_that_ended_early_is_kept_and_collected_again_exported_and_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage, heard, again = MemoryStorage(), Heard(), Heard()
    functions = threads(storage)
    result = run(stopping(), storage, functions, on_progress=Callbacks([heard]), lasts=True)
    ended = len(result.losses)
    assert result.validations[-1].stop
    assert ended < stopping().steps
    heard.check(result)
    found = status(storage, RUN, functions.open)
    assert (found.verdict, found.kept, found.saved_step) == (Verdict.FINISHED, True, ended)
    assert f"it ended early, after step {ended} of {stopping().steps}" in found.explanation
    assert found.validation == result.validations[-1]
    same_tensors(export(RUN, storage=storage), result.state_dict())
    resume = RunSettings(resume=RUN)
    collected = run(stopping(), storage, functions, settings=resume, on_progress=Callbacks([again]), lasts=True)
    assert "repeats" not in caplog.text
    assert collected.losses == result.losses
    assert collected.validations == result.validations
    same_tensors(collected.state_dict(), result.state_dict())
    same_tensors(collected.best_state_dict(), result.best_state_dict())
    again.check(result)


def test_a_run_that_ended_early_goes_on_with_more_epochs_and_has_its_patience_anew() -> None:
    storage = MemoryStorage()
    functions = threads(storage)
    result = run(stopping(), storage, functions, lasts=True)
    ended = len(result.losses)
    more = dataclasses.replace(stopping(), epochs=8)
    longer = run(more, storage, functions, settings=RunSettings(resume=RUN), lasts=True)
    assert longer.validations[:ended] == result.validations
    assert len(longer.losses) >= ended + 2
    assert [report.step for report in longer.validations] == list(range(1, len(longer.losses) + 1))
    assert longer.validations[ended].waited <= 1
    found = status(storage, RUN, functions.open)
    assert found.verdict is Verdict.FINISHED
    assert found.saved_step == len(longer.losses)
    plain = MemoryStorage()
    endless = run(dataclasses.replace(stopping(None), epochs=8), plain, threads(plain))
    assert longer.losses == endless.losses[: len(longer.losses)]
    assert [report.values for report in longer.validations] == [
        report.values for report in endless.validations[: len(longer.losses)]
    ]


def mean_loss(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        found = [nn.functional.cross_entropy(model(x[None]), y[None]).item() for x, y in learning.data()]
    model.train()
    return sum(found) / len(found)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_schedule_that_waits_for_validations_equals_torchs_own_loop(stages: int) -> None:
    plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.1, threshold=0.5)
    network = learning.network()
    graph = trace(network, (torch.zeros(2, 6, dtype=torch.float64),))
    made = dataclasses.replace(learns.job(stages=stages, scheduler=plateau, average=None), graph=graph)
    evaluation = make_evaluation(
        network,
        learning.data,
        made.plan,
        loss=made.recipe.cast_loss,
        metrics={},
        blocks=made.graph.blocks,
        every=learning.BATCHES.steps_per_epoch,
    )
    result = learns.run(dataclasses.replace(made, evaluation=evaluation))
    model, samples = learning.network(), learning.data()
    optimizer = learning.by_name(list(model.named_parameters()))
    scheduler, values = plateau(optimizer), []
    for step in learning.BATCHES.steps_from(0, learning.EPOCHS):
        optimizer.zero_grad()
        for indices in step.micro_batches:
            x, y = (torch.stack(part) for part in zip(*(samples[i] for i in indices), strict=True))
            (nn.functional.cross_entropy(model(x), y) * len(indices) / step.samples).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step.ends_epoch:
            values.append(mean_loss(model))
            scheduler.step(values[-1])
    assert optimizer.param_groups[2]["lr"] < 0.01
    assert [report.values["val_loss"] for report in result.validations] == pytest.approx(values, abs=1e-9)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(result.state_dict()[name], tensor, rtol=0, atol=1e-9)


def as_pairs(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = (torch.stack(part) for part in zip(*samples, strict=True))
    return x, y


def test_what_is_validated_on_may_be_all_that_is_trained_on_and_is_stored_once() -> None:
    tensors = TensorDataset(*as_pairs(held_out()))
    expected = None
    forms: list[Any] = [held_out, held_out(), tensors, DataLoader(held_out(), collate_fn=as_pairs)]  # type: ignore[arg-type]
    for data in forms:
        storage = Census()
        made = validated.job(Validation(data=data, every_epochs=1), epochs=1)
        result = run(made, storage, threads(storage))
        expected = expected or result.validations
        assert result.validations == expected
        shards = 0 if data is held_out else 1
        assert storage.ever["data"] == 2 + 2 + shards
    assert made.evaluation is not None
    assert made.evaluation.loading.collate is as_pairs


def test_validations_are_counted_before_a_run() -> None:
    evaluation = stopping().evaluation
    assert evaluation is not None
    batches = -(-validated.HELD_OUT // validated.BATCH)
    assert evaluation.steps_left(stopping().plan, done=0, steps=18) == 18 * batches
    every_fifth = dataclasses.replace(evaluation, every=5)
    assert every_fifth.steps_left(stopping().plan, done=5, steps=18) == 2 * batches
    alone = dataclasses.replace(evaluation, every=0)
    assert alone.steps_left(stopping().plan, done=0, steps=0) == batches
