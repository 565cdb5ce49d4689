"""Runs that are started, left to themselves, watched by others, interrupted; on functions that are threads."""

import dataclasses
import itertools
import logging
import re
import threading
from typing import Any

import pytest
import torch

from funcpipe.client.control.status import status
from funcpipe.client.control.stopping import order_end
from funcpipe.client.control.verdict import Verdict
from funcpipe.client.follow import interruption
from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.client.follow.results import OnProgress, Progress, RunResult, ignore_progress
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import Invocation, RunSettings
from funcpipe.errors import PlanError, PlatformError, RunInterrupted, StorageBusy
from funcpipe.platforms.base import Handle, Status
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.generations import list_generations, newest_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import signed
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.client.held import HeldPlatform
from tests.client.threads import RUN, STEADY, job
from tests.support.hostile_storage import HostileStorage, Hostility

EPOCHS = 2

pytestmark = pytest.mark.usefixtures("traced", "hasty")


def prepared(
    storage: MemoryStorage, functions: ThreadPlatform, settings: RunSettings, *, keep: bool = True, epochs: int = EPOCHS
) -> PreparedRun:
    own = dataclasses.replace(job(), epochs=epochs, prices=functions.spec)
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    return prepare(own, session, faults=dataclasses.replace(STEADY, keep=keep), settings=settings)


def watch(storage: MemoryStorage, functions: ThreadPlatform, on_progress: OnProgress = ignore_progress) -> RunResult:
    return launch(prepared(storage, functions, RunSettings(resume=RUN)), on_progress)


def test_a_watcher_that_is_interrupted_lets_the_run_go_on(
    storage: MemoryStorage, functions: HeldPlatform, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    functions.hold(2)
    launch_detached(prepared(storage, functions, RunSettings(name=RUN)))
    seen: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if progress.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted, match=f"interrupted while training {RUN}: it goes on") as caught:
        watch(storage, functions, interrupt)
    assert (caught.value.run, caught.value.running, caught.value.storage) == (RUN, True, "memory://")
    assert f"run {RUN}: is not watched any more, and goes on" in caplog.messages
    ready = prepared(storage, functions, RunSettings(resume=RUN))
    assert ready.running is not None
    functions.go_on()
    result = launch(ready, seen.append)
    assert [progress.step for progress in seen] == [1, 2, *range(1, 3 * EPOCHS + 1)]
    assert len(result.workers) == 6  # nobody was restarted
    assert storage.list("") == ()
    undisturbed = ThreadPlatform(load_spec("local"), storage)
    expected = launch(prepared(storage, undisturbed, RunSettings(name=RUN))).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in result.state_dict().items())


def test_a_run_that_still_runs_is_not_started_again_nor_watched_by_another_plan(
    storage: MemoryStorage, functions: HeldPlatform
) -> None:
    functions.hold(3)
    launch_detached(prepared(storage, functions, RunSettings(name=RUN), epochs=10_000))
    again = prepared(storage, functions, RunSettings(resume=RUN), epochs=10_000)
    with pytest.raises(PlanError, match=f"run {RUN} still runs; there is nothing to resume"):
        launch_detached(again)
    own = dataclasses.replace(again.job, plan=dataclasses.replace(again.job.plan, micro_batch=1))
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    with pytest.raises(PlanError, match=f"run {RUN} still runs by another plan; end it first: funcpipe run stop {RUN}"):
        prepare(own, session, settings=RunSettings(resume=RUN))


def test_a_watcher_is_told_what_the_run_had_cost_and_taken_before(
    storage: MemoryStorage, functions: HeldPlatform
) -> None:
    functions.hold(3)
    launch_detached(prepared(storage, functions, RunSettings(name=RUN), epochs=10_000))
    first: list[Progress] = []

    def stop_soon(progress: Progress) -> None:
        first.append(progress)
        if progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted):
        watch_long(storage, functions, stop_soon)
    spent = prepared(storage, functions, RunSettings(resume=RUN), epochs=10_000).account
    assert spent.spent_usd > 0
    assert spent.elapsed_s > 0
    second: list[Progress] = []

    def stop_at_once(progress: Progress) -> None:
        second.append(progress)
        raise KeyboardInterrupt

    with pytest.raises(RunInterrupted):
        watch_long(storage, functions, stop_at_once)
    assert second[0].cost_usd >= spent.spent_usd
    assert second[0].elapsed_s >= spent.elapsed_s
    assert second[0].samples_per_s == 0.0  # it has not waited for a step yet


def watch_long(storage: MemoryStorage, functions: ThreadPlatform, on_progress: OnProgress) -> None:
    launch(prepared(storage, functions, RunSettings(resume=RUN), epochs=10_000), on_progress)


def test_an_interrupt_ends_a_run_that_this_client_has_started(storage: MemoryStorage, functions: HeldPlatform) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    functions.hold(1)
    with pytest.raises(RunInterrupted) as caught:
        launch(prepared(storage, functions, RunSettings(name=RUN), keep=False, epochs=10_000), interrupt)
    assert (caught.value.running, caught.value.kept) == (False, False)
    assert storage.list("") == ()


SELDOM = dataclasses.replace(STEADY, keep=True, checkpoint_steps=10_000)
"""Nothing is saved but what is ordered."""


def long_run(
    storage: MemoryStorage, functions: ThreadPlatform, settings: RunSettings, epochs: int = 10_000
) -> PreparedRun:
    return dataclasses.replace(prepared(storage, functions, settings, epochs=epochs), faults=SELDOM)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine has time to save."""
    monkeypatch.setattr(interruption, "_BEATS", 3000)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_run_saves_a_step_and_says_how_to_go_on(
    storage: MemoryStorage, functions: HeldPlatform, end: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.step == 3:
            raise end

    def go_on_once_all_have_heard() -> None:
        while sum(message.startswith("the run is to end after step") for message in caplog.messages) < 6:
            pause.wait(0.01)
        functions.go_on()

    pause = threading.Event()
    caplog.set_level(logging.INFO)
    functions.hold(3)
    threading.Thread(target=go_on_once_all_have_heard, daemon=True).start()
    with pytest.raises(RunInterrupted if end is KeyboardInterrupt else SystemExit) as caught:
        launch(long_run(storage, functions, RunSettings(name=RUN)), interrupt)
    found = status(storage, RUN, functions.open)
    assert (found.verdict, found.workers[0].attempt) == (Verdict.STOPPED, 0)
    saved = found.saved_step
    assert found.explanation == f"it was interrupted; step {saved} of 30000 is saved"
    assert saved > 3
    said = "\n".join(caught.value.__notes__ if isinstance(caught.value, RunInterrupted) else caplog.messages)
    assert f"funcpipe train ... --resume {RUN} --storage memory://" in said
    assert f"pipe.train(dataset, ..., resume='{RUN}', storage='memory://')" in said
    if isinstance(caught.value, RunInterrupted):
        assert (
            str(caught.value) == f"interrupted while training {RUN}: it was stopped, and step {saved} of 30000 is saved"
        )
    assert f"run {RUN}: it was interrupted; it saves step {saved} and ends, for which it has" in caplog.text
    if end is SystemExit:
        return
    steps = saved + 3 - saved % 3
    again = long_run(storage, functions, RunSettings(resume=RUN), epochs=steps // 3)
    assert again.first_step == saved
    result = launch(again)
    other = MemoryStorage()
    undisturbed = ThreadPlatform(load_spec("local"), other)
    expected = launch(long_run(other, undisturbed, RunSettings(name=RUN), epochs=steps // 3))
    assert result.losses == expected.losses
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in result.state_dict().items())


class Impatient(HeldPlatform):
    """The user interrupts again as soon as functions are waited for."""

    ordered = False

    def status(self, handle: Handle) -> Status:
        """The function's state."""
        if self.ordered:
            self.ordered = False
            raise KeyboardInterrupt
        return super().status(handle)


@pytest.mark.usefixtures("patient")
def test_a_second_interrupt_ends_a_run_at_once(storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = Impatient(load_spec("local"), storage, until=3)

    def ordering(*args: Any, **words: Any) -> None:
        order_end(*args, **words)
        functions.ordered = True

    monkeypatch.setattr(interruption, "order_end", ordering)

    def interrupt(progress: Progress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted, match="it was stopped before a step was saved") as caught:
        launch(long_run(storage, functions, RunSettings(name=RUN)), interrupt)
    assert caught.value.saved_step == 0
    assert long_run(storage, functions, RunSettings(resume=RUN)).running is None  # no function is left


def test_functions_that_do_not_save_in_time_are_ended(
    storage: MemoryStorage, functions: HeldPlatform, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.step == 2:
            raise KeyboardInterrupt

    functions.hold(3)
    saving = prepared(storage, functions, RunSettings(name=RUN), epochs=10_000)
    with pytest.raises(RunInterrupted, match="it was stopped"):
        launch(saving, interrupt)
    assert re.search(rf"run {RUN}: no further step is saved: \d+ s after the interrupt its functions have", caplog.text)
    assert prepared(storage, functions, RunSettings(resume=RUN), epochs=10_000).running is None


def test_a_resumed_run_is_billed_from_its_first_start(storage: MemoryStorage, functions: HeldPlatform) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    functions.hold(4)
    with pytest.raises(KeyboardInterrupt):
        launch(prepared(storage, functions, RunSettings(name=RUN)), interrupt)
    functions.go_on()
    going_on = prepared(storage, functions, RunSettings(resume=RUN))
    assert going_on.running is None
    spent_usd = going_on.account.spent_usd
    assert spent_usd > 0
    seen: list[Progress] = []
    result = launch(going_on, seen.append)
    assert seen[0].cost_usd >= spent_usd
    assert result.bill.earlier_usd == spent_usd
    assert result.bill.cost_usd > result.bill.earlier_usd
    assert len(result.losses) == 3 * EPOCHS


class Full(ThreadPlatform):
    """A platform that starts two functions and no more."""

    count = itertools.count()

    def invoke(self, worker: Invocation) -> Handle:
        if next(self.count) == 2:
            raise PlatformError("no room")
        return super().invoke(worker)


@pytest.mark.parametrize("start", [launch, launch_detached])
def test_a_start_that_fails_leaves_the_run_as_it_was(storage: MemoryStorage, start: object) -> None:
    full = Full(load_spec("local"), storage)
    full.count = itertools.count()
    ready = prepared(storage, full, RunSettings(name=RUN))
    with pytest.raises(PlatformError, match="no room"):
        start(ready)  # type: ignore[operator]
    assert storage.list("") == ()


@pytest.mark.parametrize("unwritable_from", [1, 30])
def test_a_run_that_could_not_begin_is_not_said_to_be_resumed(traced: None, unwritable_from: int) -> None:
    """Before, its notes said how to resume it, and `--resume` that there is no run."""
    storage = HostileStorage(MemoryStorage(), Hostility(unwritable_from=unwritable_from))
    functions = ThreadPlatform(load_spec("local"), storage)
    site = Site(functions, storage, "memory://")
    session = dataclasses.replace(session_on(site, reopen=functions.open), lasts=True)
    ready = prepare(job(), session, faults=STEADY, settings=RunSettings(name=RUN))
    with pytest.raises(StorageBusy, match="Read-only") as failed:
        launch(ready)
    assert failed.value.__notes__ == [
        f"  begin anew: run {RUN} had not begun; once this is mended, the same command begins it"
    ]
    storage.heal()
    assert launch(prepare(job(), session, faults=STEADY, settings=RunSettings(name=RUN))).losses


def test_a_resume_that_fails_to_start_can_be_tried_again(storage: MemoryStorage, functions: HeldPlatform) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    functions.hold(4)
    with pytest.raises(KeyboardInterrupt):
        launch(prepared(storage, functions, RunSettings(name=RUN)), interrupt)
    keys = Keys.of(newest_record(signed(storage), RUN))
    before = {key for key in storage.list("") if key.startswith(keys.prefix)}
    full = Full(load_spec("local"), storage)
    full.count = itertools.count()
    own = dataclasses.replace(job(), epochs=EPOCHS, prices=full.spec)
    session = session_on(Site(full, storage, "memory://"), reopen=functions.open)
    ready = prepare(own, session, faults=dataclasses.replace(STEADY, keep=True), settings=RunSettings(resume=RUN))
    with pytest.raises(PlatformError, match="no room"):
        launch(ready)
    assert before <= set(storage.list(""))
    assert list_generations(storage, RUN) == (keys,)
    assert Keys.of(newest_record(signed(storage), RUN)) == keys
