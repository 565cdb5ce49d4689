"""Runs that are validated: equal to one process in eval mode, through kills, hand-overs and resumes; ended early."""

import dataclasses
import functools
import itertools
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.core import FaultTolerance, Outcome, RunSettings, Validation
from funcpipe.core.validation import Monitor, MonitorMode, next_report
from funcpipe.errors import InvalidValue, RunUnknown
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.reports import ValidationKeys
from funcpipe.testing.faults import ClientKilled, FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from funcpipe.worker import hand_over
from tests.client import validated
from tests.client.validated import RUN, STEADY, error_rate, held_out, mean_loss, net, run
from tests.support.census import Census

EVERY = 2
BAD_LR = 3.0
"""With this learning rate the loss grows from the first step on."""


@functools.cache
def job() -> Job:
    """Validated every second of six steps; traced once."""
    return validated.job(Validation(data=held_out, every_steps=EVERY, metrics={"error": error_rate}, mode="min"))


@pytest.fixture(autouse=True)
def drawing_in_turn() -> Iterator[None]:
    job()
    with one_at_a_time():
        yield


def threads(storage: MemoryStorage, faults: FunctionFaults | None = None, victim: int = 0) -> ThreadPlatform:
    """Functions of which the one of invocation `victim` suffers `faults`."""

    def faults_of(number: int) -> FunctionFaults:
        return faults if faults is not None and number == victim else FunctionFaults()

    return ThreadPlatform(load_spec("local"), storage, faults_of=faults_of)


@functools.cache
def undisturbed() -> RunResult:
    """What the job leaves if nothing goes wrong."""
    storage = MemoryStorage()
    return run(job(), storage, threads(storage))


def same(found: RunResult, expected: RunResult) -> None:
    """The same bits: what was trained, what was the best, and what every validation has found."""
    assert found.validations == expected.validations
    assert found.losses == expected.losses
    pairs = (found.state_dict(), expected.state_dict()), (found.best_state_dict(), expected.best_state_dict())
    for one, two in pairs:
        assert one.keys() == two.keys()
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_a_validation_equals_one_process_in_eval_mode_whatever_the_plan() -> None:
    result = undisturbed()
    assert [report.step for report in result.validations] == [2, 4, 6]
    assert [report.samples for report in result.validations] == [validated.HELD_OUT] * 3
    expected = mean_loss(net(), result.state_dict(), held_out())
    assert result.validations[-1].values["val_loss"] == pytest.approx(expected, abs=1e-12)
    outputs = validated.evaluated(net(), result.state_dict(), held_out())
    wrong = sum(int((output.argmax(1) != target).sum()) for output, target in outputs)
    assert result.validations[-1].values["error"] == pytest.approx(wrong / validated.HELD_OUT, abs=1e-12)
    whole = validated.job(Validation(data=held_out, every_steps=EVERY), stages=1, replicas=1)
    storage = MemoryStorage()
    in_one = run(whole, storage, threads(storage))
    for one, two in zip(result.validations, in_one.validations, strict=True):
        assert one.values["val_loss"] == pytest.approx(two.values["val_loss"], abs=1e-9)


def test_training_does_not_depend_on_being_validated() -> None:
    storage = MemoryStorage()
    plain = run(dataclasses.replace(job(), evaluation=None), storage, threads(storage))
    assert all(torch.equal(t, plain.state_dict()[name]) for name, t in undisturbed().state_dict().items())
    assert plain.losses == undisturbed().losses
    assert plain.validations == ()
    assert plain.best_step is None
    with pytest.raises(RunUnknown, match="has kept no best model"):
        plain.best_state_dict()


def test_the_best_model_is_the_one_of_the_best_step_and_progress_tells_of_validations() -> None:
    seen: list[Progress] = []
    storage = MemoryStorage()
    result = run(job(), storage, threads(storage), on_progress=seen.append)
    losses = {report.step: report.values["val_loss"] for report in result.validations}
    assert result.best_step == min(losses, key=losses.__getitem__)
    found = mean_loss(net(), result.best_state_dict(), held_out())
    assert found == pytest.approx(min(losses.values()), abs=1e-12)
    told = [(progress.step, progress.validation) for progress in seen]
    assert told == list(
        itertools.chain.from_iterable(
            [(step, None), *[(step, report) for report in result.validations if report.step == step]]
            for step in range(1, 7)
        )
    )
    assert storage.list("") == ()


@pytest.mark.parametrize(
    ("victim", "writing"),
    [
        (0, (".eval/", 3)),
        (2, ("validations/", 1)),
        (3, ("scores/", 2)),
        (1, (".eval/", 5)),
        (0, ("best/", 1)),
        (2, ("best/", 1)),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [(0, (".eval/", 9)), (2, ("scores/", 1)), (2, ("scores/", 4))]
        ),
    ],
)
def test_a_function_that_is_killed_in_a_validation_changes_no_bit(victim: int, writing: tuple[str, int]) -> None:
    storage, faults = MemoryStorage(), FunctionFaults(killed_writing=writing)
    quick = dataclasses.replace(STEADY, lease_s=0.2)
    result = run(job(), storage, threads(storage, faults, victim), faults=quick)
    assert faults.dead.is_set()
    same(result, undisturbed())


def test_functions_that_hand_over_in_and_between_validations_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hand_over, "leaves_at_s", lambda *_: 0.0)  # after one step each, or one batch of a validation
    storage = MemoryStorage()
    with caplog.at_level(logging.INFO, logger="funcpipe"):
        result = run(job(), storage, threads(storage), faults=dataclasses.replace(STEADY, lifetime_s=600.0))
    leave = sum(report.outcome is Outcome.HANDED_OVER for report in result.workers)
    assert leave >= 4 * (len(result.losses) - 1)
    assert [text for text in caplog.messages if re.match(r"validates after step \d+, from batch 1 of 2", text)]
    same(result, undisturbed())


@pytest.mark.parametrize("last", [1, 3, pytest.param(2, marks=pytest.mark.long), 5])
def test_a_run_that_is_resumed_goes_on_with_its_validations(last: int) -> None:
    storage = MemoryStorage()
    functions = threads(storage)

    def die(progress: Progress) -> None:
        if progress.step == last:
            functions.stop_all()
            raise ClientKilled

    with pytest.raises(ClientKilled):
        run(job(), storage, functions, on_progress=die)
    result = run(job(), storage, threads(storage), settings=RunSettings(resume=RUN), before=functions)
    same(result, undisturbed())


def test_a_run_ends_early_once_validations_get_no_better_and_leaves_what_it_had_learned_by_then() -> None:
    storage = MemoryStorage()
    made = validated.job(Validation(data=held_out, every_steps=1, patience=2), epochs=6, lr=BAD_LR)
    result = run(made, storage, threads(storage))
    reports = result.validations
    assert [report.stop for report in reports] == [False] * (len(reports) - 1) + [True]
    assert result.best_step is not None
    assert reports[-1].step == result.best_step + 2 == len(result.losses) < made.steps
    last = mean_loss(net(), result.state_dict(), held_out())
    assert last == pytest.approx(reports[-1].values["val_loss"], rel=1e-9)
    assert mean_loss(net(), result.best_state_dict(), held_out()) < last
    assert all(report.outcome.value == "finished" for report in result.workers)


def test_a_run_that_ended_early_is_collected_and_not_trained_on() -> None:
    storage = MemoryStorage()
    functions = threads(storage)
    made = validated.job(Validation(data=held_out, every_steps=1, patience=2), epochs=6, lr=BAD_LR)

    def gone(progress: Progress) -> None:
        if progress.validation is not None and progress.validation.stop:
            for function in functions._functions.values():
                assert function.thread is not None
                function.thread.join()
            raise KeyboardInterrupt

    with pytest.raises(BaseException, match="interrupted"):
        run(made, storage, functions, on_progress=gone)
    steps: list[int] = []
    result = run(
        made, storage, functions, settings=RunSettings(resume=RUN), on_progress=lambda told: steps.append(told.step)
    )
    assert result.validations[-1].stop
    assert len(result.losses) == result.validations[-1].step == steps[-1]
    assert len(result.best_state_dict()) == len(result.state_dict())


def test_validations_leave_few_objects_behind() -> None:
    storage = Census()
    long = validated.job(Validation(data=lambda: validated.samples(160, 3), every_steps=2), epochs=2)
    run(long, storage, threads(storage))
    batches, replicas = 20, 2
    assert storage.ever["scores"] == 3 * batches * replicas
    assert storage.most["messages/s0.r0.eval"] <= 2 * 9 + 2  # micro-batches of the batches that it may be ahead
    assert storage.most["scores"] <= 2 * batches * replicas
    assert storage.most["best"] <= 2 * 2 * 2


def test_a_best_model_goes_once_the_run_cannot_be_resumed_before_the_next() -> None:
    storage, steady = Census(), FaultTolerance(heartbeat_s=0.2, lease_s=30.0, checkpoint_steps=1)
    improving = validated.job(Validation(data=validated.data, every_steps=1), epochs=4, lr=0.002)
    result = run(improving, storage, threads(storage), faults=steady)
    assert sum(report.best_step == report.step for report in result.validations) > 5
    assert storage.most["best"] < storage.ever["best"]
    assert mean_loss(net(), result.best_state_dict(), validated.data()) == pytest.approx(
        min(report.values["val_loss"] for report in result.validations)
    )


def test_the_models_of_the_best_validations_are_kept_through_a_kill_and_a_resume_and_no_others() -> None:
    wanted, storage = Validation(data=held_out, every_steps=1, keep_best=3), Census()
    made = validated.job(wanted, epochs=4, lr=0.2)
    faults = FunctionFaults(killed_writing=("best/", 2))
    quick = dataclasses.replace(STEADY, lease_s=0.2)
    result = run(made, storage, threads(storage, faults), faults=quick)
    assert faults.dead.is_set()
    losses = {report.step: report.values["val_loss"] for report in result.validations}
    assert list(result.best_models) == sorted(losses, key=losses.__getitem__)[:3]
    assert sorted(result.best_models) != sorted(losses)[-3:], "or the newest would do"
    for step in result.best_models:
        found = mean_loss(net(), result.best_state_dict(step), held_out())
        assert found == pytest.approx(losses[step], rel=1e-9)
    with pytest.raises(RunUnknown, match=f"no best model after step 99; the best are those after .{result.best_step}"):
        result.best_state_dict(99)
    assert storage.most["best"] < storage.ever["best"]

    def stop(progress: Progress) -> None:
        if progress.step == 9:
            raise KeyboardInterrupt

    storage = Census()
    functions = threads(storage)
    with pytest.raises(BaseException, match="interrupted"):
        run(made, storage, functions, on_progress=stop)
    resumed = run(made, storage, threads(storage), settings=RunSettings(resume=RUN), before=functions)
    same(resumed, result)
    assert resumed.best_models.keys() == result.best_models.keys()


def test_the_kept_models_are_the_best_one_and_the_next_by_value() -> None:
    values = {1: 0.5, 2: math.nan, 3: 0.45, 4: 0.2, 5: 0.3, 6: 0.1}
    ranked: list[tuple[int, ...]] = []
    report = None
    for step, value in values.items():
        monitor = Monitor(min_delta=0.25, keep_best=2)
        report = next_report(monitor, report, step=step, samples=1, values={"val_loss": value})
        ranked.append(report.best_steps)
    assert ranked == [(1,), (1,), (1, 3), (4, 3), (4, 5), (4, 6)], "6 is not better than 4 by 0.25"
    assert report is not None
    assert report.best_values == (0.2, 0.1)
    most = Monitor(mode=MonitorMode.MAX, keep_best=2)
    assert most.ranked(values, 1) == [1, 3]
    assert dataclasses.replace(most, keep_best=0).ranked(values, 1) == []


def test_torchmetrics_are_summed_over_replicas_and_may_be_what_decides() -> None:
    from torchmetrics.classification import MulticlassAUROC

    def metrics() -> dict[str, Any]:
        return {"auroc": MulticlassAUROC(4), "error": error_rate}

    storage = MemoryStorage()
    made = validated.job(Validation(data=held_out, every_steps=2, metrics=metrics(), monitor="auroc", mode="max"))
    faults = FunctionFaults(killed_writing=("scores/", 2))
    result = run(made, storage, threads(storage, faults, 3), faults=dataclasses.replace(STEADY, lease_s=0.2))
    assert faults.dead.is_set()
    one = metrics()["auroc"]
    for output, target in validated.evaluated(net(), result.state_dict(), held_out()):
        one.update(output, target)
    found = [report.values["auroc"] for report in result.validations]
    assert found[-1] == pytest.approx(float(one.compute()), abs=1e-7)
    best = max(found)
    assert result.best_step == result.validations[found.index(best)].step


@pytest.mark.parametrize("stages", [1, 2])
def test_a_schedule_that_waits_for_validations_follows_them_in_all_stages_through_a_kill(stages: int) -> None:
    plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.1)
    made = validated.job(Validation(data=held_out, every_steps=1), epochs=2, stages=stages, lr=0.05)
    made = dataclasses.replace(made, recipe=dataclasses.replace(made.recipe, scheduler=plateau))
    storage, faults = MemoryStorage(), FunctionFaults(killed_writing=("validations/", 4))
    quick = dataclasses.replace(STEADY, lease_s=0.2)
    victim = 2 * (stages - 1)
    result = run(made, storage, threads(storage, faults, victim), faults=quick)
    assert faults.dead.is_set()
    storage = MemoryStorage()
    same(result, run(made, storage, threads(storage)))
    plain = dataclasses.replace(made, recipe=dataclasses.replace(made.recipe, scheduler=None))
    storage = MemoryStorage()
    assert result.losses != run(plain, storage, threads(storage)).losses


def test_keys_of_validations_belong_to_their_generation_and_messages_to_none_of_training() -> None:
    keys = ValidationKeys(RUN, 3, "ab12")
    message = keys.batch_message("s0.r1", 4, 2, "put-activation.s0.r1.m1.k0")
    assert message == "run-1/100/g0003-ab12/messages/s0.r1.eval/00000004.00000002/put-activation.s0.r1.m1.k0"
    assert not message.startswith(keys.messages("s0.r1"))
    assert keys.best.checkpoint(1, "x").startswith(keys.best.checkpoints)
    assert not keys.best.checkpoints.startswith(keys.checkpoints)


def test_a_validation_that_cannot_be_is_refused_before_it_begins() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"monitor": "accuracy"}, "monitor must be one of val_loss"),
        ({"every_steps": 1, "every_epochs": 1}, "must not both be given"),
        ({"every_steps": 0}, "must be at least 1"),
        ({"patience": 0}, "must be at least 1"),
        ({"mode": "best"}, "must be min or max"),
        ({"keep_best": -1}, "keep_best must be a whole number of at least 0"),
        ({"metrics": {"val_loss": error_rate}}, "is the name of the loss"),
    ]
    for wrong, why in refused:
        with pytest.raises(InvalidValue, match=why):
            Validation(data=held_out, **wrong)
    assert Validation(data=held_out).interval(7) == 7
    assert Validation(data=held_out, every_epochs=2).interval(7) == 14
