"""Callbacks hear of everything in order, and what they raise costs the run nothing."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from funcpipe.client.follow.callbacks import LOOK_S, Callback, Callbacks, EachStep, RunInfo, run_info
from funcpipe.client.follow.export import SavedModel
from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import RunSettings
from funcpipe.errors import InvalidValue, RunHalted
from funcpipe.loggers import CheckpointFiles
from funcpipe.runstate.signing import signed
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.state import StageState
from funcpipe.training.state_dict import StateDict
from tests.client.threads import RUN, STEADY, job

pytestmark = pytest.mark.usefixtures("traced")


class Recorder(Callback):
    """Notes what it hears of, and raises an error at the step `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.heard: list[str] = []
        self.fails_at = fails_at
        self.info: RunInfo | None = None

    def on_start(self, run: RunInfo) -> None:
        self.info = run
        self.heard.append(f"start after {len(run.losses)}")

    def on_step(self, progress: Progress) -> None:
        if progress.step == self.fails_at:
            raise ValueError(f"cannot log step {progress.step}")
        self.heard.append(f"step {progress.step}")

    def on_end(self, result: RunResult) -> None:
        self.heard.append(f"end after {len(result.losses)}")

    def on_error(self, error: BaseException) -> None:
        self.heard.append(type(error).__name__)


def one_epoch() -> Job:
    """Three steps."""
    return dataclasses.replace(job(), epochs=1)


def train(
    storage: MemoryStorage, functions: ThreadPlatform, *callbacks: Callback, settings: RunSettings | None = None
) -> RunResult:
    """As `FuncPipe.train` does it."""
    site = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    prepared = prepare(one_epoch(), site, faults=STEADY, settings=settings or RunSettings(name=RUN))
    told = Callbacks(callbacks)
    with told.of_run(run_info(prepared)):
        return told.ended(launch(prepared, told))


STEPS = [f"step {number}" for number in range(1, 4)]


def test_a_callback_hears_of_everything_in_order(storage: MemoryStorage, functions: ThreadPlatform) -> None:
    recorder = Recorder()
    result = train(storage, functions, recorder)
    assert recorder.heard == ["start after 0", *STEPS, "end after 3"]
    assert result.callback_errors == ()
    assert recorder.info is not None
    assert (recorder.info.run, recorder.info.steps, recorder.info.resumed) == (RUN, 3, False)


def test_an_exception_in_a_callback_loses_nothing(
    storage: MemoryStorage, functions: ThreadPlatform, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = Recorder(fails_at=2), Recorder()
    with caplog.at_level(logging.ERROR):
        result = train(storage, functions, failing, other)
    assert len(result.losses) == 3
    assert [str(error) for error in result.callback_errors] == ["cannot log step 2"]
    assert failing.heard == ["start after 0", "step 1", "end after 3"]
    assert other.heard == ["start after 0", *STEPS, "end after 3"]
    (record,) = [record for record in caplog.records if record.name == "funcpipe.client.follow.callbacks"]
    assert record.message == "Recorder.on_step has failed, and is not called again; the run goes on"
    assert record.exc_info is not None
    assert "cannot log step 2" in str(record.exc_info[1])


def test_a_run_that_was_left_to_itself_is_told_of_from_its_start_and_once(
    storage: MemoryStorage, functions: ThreadPlatform
) -> None:
    site = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    launch_detached(prepare(one_epoch(), site, faults=STEADY, settings=RunSettings(name=RUN)))
    recorder = Recorder()
    train(storage, functions, recorder, settings=RunSettings(resume=RUN))
    assert recorder.heard == ["start after 0", *STEPS, "end after 3"]
    assert recorder.info is not None
    assert recorder.info.resumed


def test_callbacks_hear_of_a_failure_and_cannot_hide_it() -> None:
    recorder, failing = Recorder(), Recorder(fails_at=1)
    info = RunInfo(run=RUN, plan=job().plan, epochs=1, steps=9, samples=24, storage="memory://")
    told = Callbacks([failing, recorder])

    def fail() -> None:
        with told.of_run(info):
            told(Progress(step=1, steps=9, loss=1.0, samples_per_s=0.0, cost_usd=0.0))
            told.validated(1, {"val_loss": 1.0})
            raise RunHalted("was ended")

    with pytest.raises(RunHalted):
        fail()
    assert recorder.heard == ["start after 0", "step 1", "RunHalted"]
    assert failing.heard == ["start after 0", "RunHalted"]


def test_a_function_is_called_with_each_step() -> None:
    seen: list[int] = []
    EachStep(lambda progress: seen.append(progress.step)).on_step(
        Progress(step=4, steps=9, loss=1.0, samples_per_s=0.0, cost_usd=0.0)
    )
    assert seen == [4]


def test_what_is_no_callback_is_refused_before_anything_starts() -> None:
    for wrong in (print, Callback):
        with pytest.raises(InvalidValue, match=r"callbacks\[1\] must be a Callback.*EachStep\(function\), got"):
            Callbacks([EachStep(print), wrong])  # type: ignore[list-item]


class Epochs(Callback):
    """Notes the ends of epochs, and the checkpoints, which it reads."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.saved: list[SavedModel] = []

    def on_step(self, progress: Progress) -> None:
        self.heard.append(progress.step)

    def on_epoch(self, epoch: int, progress: Progress) -> None:
        self.heard.append(f"epoch {epoch} after {progress.step}")

    def on_checkpoint(self, step: int, load: Callable[[], SavedModel]) -> None:
        self.heard.append(f"checkpoint {step}")
        self.saved.append(load())


def test_the_end_of_each_epoch_is_reported_after_its_last_step(
    storage: MemoryStorage, functions: ThreadPlatform
) -> None:
    heard = Epochs()
    train(storage, functions, heard)
    assert [one for one in heard.heard if not str(one).startswith("checkpoint")] == [1, 2, 3, "epoch 1 after 3"]


def kept(storage: MemoryStorage, functions: ThreadPlatform) -> tuple[RunInfo, RunResult]:
    """A run whose checkpoint after step 3 is kept."""
    site = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    prepared = prepare(
        one_epoch(), dataclasses.replace(site, lasts=True), faults=STEADY, settings=RunSettings(name=RUN)
    )
    return run_info(prepared), launch(prepared)


def progress_of(step: int) -> Progress:
    return Progress(step=step, steps=9, loss=1.0, samples_per_s=1.0, cost_usd=0.0)


def test_a_checkpoint_is_reported_once_when_it_is_time_to_look(
    storage: MemoryStorage, functions: ThreadPlatform
) -> None:
    info, result = kept(storage, functions)
    heard, now = Epochs(), [0.0]
    told = Callbacks([heard], clock=lambda: now[0])
    with told.of_run(dataclasses.replace(info, steps_per_epoch=0), signed(storage)):
        for step in (1, 2, 3):
            now[0] += LOOK_S * 0.6
            told(progress_of(step))
    assert heard.heard == [1, 2, "checkpoint 3", 3]
    assert [saved.step for saved in heard.saved] == [3]
    found = heard.saved[0].state_dict()
    assert found.keys() == result.tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in result.tensors.items())


def test_nothing_is_asked_of_the_storage_for_callbacks_without_the_method(
    storage: MemoryStorage, functions: ThreadPlatform
) -> None:
    info, _ = kept(storage, functions)
    now = iter(range(0, 1000, 10))
    told = Callbacks([Recorder()], clock=lambda: next(now))
    before = storage.list("")
    storage.list = None  # type: ignore[method-assign, assignment]
    with told.of_run(info, signed(storage)):
        told(progress_of(1))
    del storage.list
    assert storage.list("") == before


def test_a_run_whose_storage_fails_goes_on(storage: MemoryStorage, caplog: pytest.LogCaptureFixture) -> None:
    heard, now = Epochs(), iter(range(0, 1000, 10))
    told = Callbacks([heard], clock=lambda: next(now))
    info = RunInfo(run="gone", plan=job().plan, epochs=1, steps=9, samples=24, storage="memory://")
    with caplog.at_level(logging.INFO, logger="funcpipe"), told.of_run(info, signed(storage)):
        told(progress_of(1))
    assert heard.heard == [1]
    assert "run gone: cannot look for checkpoints: there is no run 'gone'" in caplog.text


def test_files_are_written_of_checkpoints_that_are_far_enough_apart_and_of_the_result(
    storage: MemoryStorage, functions: ThreadPlatform, tmp_path: Path
) -> None:
    info, result = kept(storage, functions)
    files = CheckpointFiles(tmp_path / "models", every_steps=2, keep=2)
    files.on_start(info)
    for step in (1, 2, 3, 4):
        state = StageState(tensors={"model/w": torch.tensor([step])}, aliases={}, transient=frozenset(), settings={})
        files.on_step(progress_of(step))
        files.on_checkpoint(
            step, functools.partial(SavedModel, run=RUN, step=step, steps=4, state=state, base=StateDict({}))
        )
    names = [file.name for file in sorted((tmp_path / "models").iterdir())]
    assert names == [f"{RUN}-00000002.pt", f"{RUN}-00000004.pt"]
    assert torch.load(tmp_path / "models" / names[1]) == {"w": torch.tensor([4])}
    files.on_step(progress_of(5))
    models = {step: {name: tensor + step for name, tensor in result.tensors.items()} for step in (4, 2, 3)}
    files.on_end(dataclasses.replace(result, best_models=models))
    for name, step in ("best", 4), ("best-2", 2), ("best-3", 3):
        best = torch.load(tmp_path / "models" / f"{RUN}-{name}.pt")
        assert all(torch.equal(best[key], tensor + step) for key, tensor in result.tensors.items())
        (tmp_path / "models" / f"{RUN}-{name}.pt").unlink()
    names = [file.name for file in sorted((tmp_path / "models").iterdir())]
    assert names == [f"{RUN}-00000004.pt", f"{RUN}-00000005.pt"]
    assert torch.load(tmp_path / "models" / names[1]).keys() == result.tensors.keys()
