"""Runs that were left to themselves, and have finished before anybody comes back; on functions that are threads."""

import functools
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import cast

import pytest
import torch

from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import DEFAULT_STORES, Invocation, Outcome, PlatformSpec, RunSettings
from funcpipe.core.run_key import RunKey
from funcpipe.errors import PlanError, PlatformError, RunInterrupted
from funcpipe.platforms.base import Handle, OpenPlatform, PlainKeys, Platform
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.generations import list_generations, newest_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.liveness import newest_heartbeat
from funcpipe.runstate.reader import reported_requests, spent_so_far, worker_reports
from funcpipe.runstate.resume import load_resume_point
from funcpipe.runstate.signing import KeyFolder, key_of, signed
from funcpipe.testing.memory_storage import MemoryStorage
from tests.client.held import HeldPlatform
from tests.client.threads import RUN, STEADY, job
from tests.run_documents import REPORT

EPOCHS = 2
STEPS = 3 * EPOCHS
LEFT = replace(REPORT, outcome=Outcome.HANDED_OVER, gets=20)

pytestmark = pytest.mark.usefixtures("traced")


class Counting(HeldPlatform):
    """Threads, and how many there were."""

    invoked = 0

    def invoke(self, worker: Invocation) -> Handle:
        self.invoked += 1
        return super().invoke(worker)

    def wait(self) -> None:
        """Wait until all functions have ended by themselves."""
        for thread in threading.enumerate():
            if thread.name.startswith("function "):
                thread.join(60)
                assert not thread.is_alive()


@pytest.fixture
def functions(storage: MemoryStorage) -> Iterator[Counting]:
    platform = Counting(load_spec("local"), storage)
    yield platform
    platform.stop_all()


def gone(url: str) -> Platform:
    raise PlatformError(f"there is no platform {url} any more")


class EndedHost(PlainKeys):
    """A local host that has ended: it can be named, but answers nothing."""

    url = "local:///ended"

    @property
    def spec(self) -> PlatformSpec:
        raise PlatformError(f"there is no host of local functions at {self.url} any more")


def ended(url: str) -> Platform:
    return cast(Platform, EndedHost())


def prepared(
    storage: MemoryStorage,
    functions: Counting,
    settings: RunSettings | None = None,
    *,
    reopen: OpenPlatform | None = None,
    **changes: object,
) -> PreparedRun:
    own = replace(job(), epochs=EPOCHS, prices=functions.spec)
    session = session_on(Site(functions, storage, "memory://"), reopen=reopen or functions.open)
    wanted = settings or RunSettings(resume=RUN)
    faults = replace(STEADY, keep=True)
    return prepare(replace(own, **changes), session, faults=faults, settings=wanted)  # type: ignore[arg-type]


@functools.cache
def left() -> tuple[MemoryStorage, Counting, RunKey]:
    """A run of six functions that was left to itself, and has ended; and its key."""
    storage = MemoryStorage()
    platform = Counting(load_spec("local"), storage)
    launch_detached(prepared(storage, platform, RunSettings(name=RUN)))
    platform.wait()
    return storage, platform, key_of(KeyFolder(), Keys.of(newest_record(signed(storage), RUN)))


@functools.cache
def watched() -> RunResult:
    """What the same run leaves to a client that watches it."""
    storage = MemoryStorage()
    return launch(prepared(storage, Counting(load_spec("local"), storage), RunSettings(name=RUN)))


def left_to_its_end(storage: MemoryStorage, functions: Counting) -> Keys:
    """Let `storage` and `functions` be those of a run that was left to itself, and has ended."""
    objects, platform, key = left()
    for name in objects.list(""):
        storage.put(name, objects.get(name))
    functions._functions.update(platform._functions)
    functions._numbers = count(platform.invoked)
    functions.invoked = platform.invoked
    (keys,) = list_generations(storage, RUN)
    if KeyFolder().find(keys) is None:  # it went with the result of another test
        KeyFolder().keep(keys, key)
    return Keys.of(newest_record(signed(storage), RUN))


@pytest.mark.parametrize("reopen", [None, gone, ended])
def test_a_run_that_has_finished_is_collected_with_its_own_bill(
    storage: MemoryStorage, functions: Counting, reopen: OpenPlatform | None
) -> None:
    keys = left_to_its_end(storage, functions)
    reports = worker_reports(signed(storage), keys)
    ready = prepared(storage, functions, reopen=reopen)
    assert ready.has_finished
    seen: list[Progress] = []
    result = launch(ready, seen.append)
    assert functions.invoked == result.bill.functions == 6
    assert result.bill.function_seconds == pytest.approx(sum(report.alive_s for report in reports))
    client = result.bill.client
    assert client.gets > 0
    assert result.bill.puts == client.puts + sum(report.puts for report in reports)
    assert result.bill.lists == client.lists + sum(report.lists for report in reports)
    assert result.bill.gets == client.gets + sum(report.gets for report in reports)
    assert result.bill.earlier_usd == 0.0
    assert result.workers == reports
    assert [progress.step for progress in seen] == list(range(1, STEPS + 1))
    assert {progress.learning_rate for progress in seen} == {0.01}
    assert seen[0].cost_usd >= ready.account.spent_usd > 0
    assert {event.stage for event in result.trace.events} == {0, 1, 2}
    assert storage.list("") == ()
    expected = watched()
    assert result.losses == expected.losses
    assert result.bill.functions == expected.bill.functions
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in result.state_dict().items())


def test_a_run_that_has_finished_goes_on_where_more_is_wanted_than_its_result(
    storage: MemoryStorage, functions: Counting
) -> None:
    left_to_its_end(storage, functions)
    longer = prepared(storage, functions, epochs=EPOCHS + 1)
    other = prepared(storage, functions, plan=replace(job().plan, micro_batch=1))
    anew = prepared(storage, functions, RunSettings(resume=RUN, from_start=True))
    assert [run.running for run in (longer, other, anew)] == [None, None, None]
    assert [run.resumed.step for run in (longer, other, anew) if run.resumed is not None] == [STEPS, STEPS, 0]
    with pytest.raises(PlanError, match=f"run {RUN} has finished; there is nothing to resume, only a result"):
        launch_detached(prepared(storage, functions))
    assert functions.invoked == 6


def test_a_result_whose_last_checkpoint_is_lost_is_trained_again(storage: MemoryStorage, functions: Counting) -> None:
    keys = left_to_its_end(storage, functions)
    last = [key for key in storage.list(f"{keys.checkpoints}s1/") if f"{STEPS:08d}" in key]
    assert last
    storage.delete_many(last)
    again = prepared(storage, functions)
    assert again.running is None
    assert again.resumed is not None
    assert again.resumed.step < STEPS
    assert len(launch(again).losses) == STEPS
    assert storage.list("") == ()


def test_a_loss_that_is_lost_does_not_keep_a_result_from_being_collected(
    storage: MemoryStorage, functions: Counting
) -> None:
    keys = left_to_its_end(storage, functions)
    storage.delete_many([keys.step_report(1, f"s2.r{replica}") for replica in range(2)])
    result = launch(prepared(storage, functions))
    assert [step for step, loss in enumerate(result.losses) if math.isnan(loss)] == [1]
    assert functions.invoked == 6


def test_a_watcher_begins_from_what_the_run_has_cost_when_its_turn_comes(
    storage: MemoryStorage, functions: Counting
) -> None:
    keys = left_to_its_end(storage, functions)
    ready, seen = prepared(storage, functions), list[Progress]()
    beat = newest_heartbeat(signed(storage), keys, "s0.r0")
    assert beat is not None
    later = replace(beat, run_usd=5.0, run_s=500.0)
    put_document(signed(storage), keys.heartbeat("s0.r0", beat.attempt), later)  # another client has watched meanwhile
    launch(ready, seen.append)
    assert seen[0].cost_usd >= 5.0
    assert seen[0].elapsed_s >= 500.0


def test_what_a_generation_has_cost_with_its_requests_is_on_the_bill_of_the_next(
    storage: MemoryStorage, functions: Counting
) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    functions.hold(4)
    with pytest.raises(RunInterrupted):
        launch(prepared(storage, functions, RunSettings(name=RUN), epochs=10_000), interrupt)
    functions.go_on()
    record = newest_record(signed(storage), RUN)
    keys = Keys.of(record)
    for worker, puts in (("s0.r0", 1000), ("s1.r1", 500)):  # functions that are ended at once report nothing
        report = replace(LEFT, worker=worker, attempt=7, puts=puts)
        put_document(signed(storage), keys.worker_report(worker, 7), report)
    spent_usd = spent_so_far(signed(storage), record).spent_usd
    invocations = len(list_functions(signed(storage), keys))
    step = load_resume_point(signed(storage), record).step
    epochs = step // 3 + 2
    going_on = prepared(storage, functions, epochs=epochs)
    spec = functions.spec
    told = reported_requests(signed(storage), keys, worker_reports(signed(storage), keys))
    requests_usd = spec.counted_usd(told, DEFAULT_STORES)
    assert requests_usd >= 1500 * spec.price_put_usd
    expected_usd = spent_usd + requests_usd + invocations * spec.price_invocation_usd
    assert going_on.account.spent_usd == pytest.approx(expected_usd)
    launch_detached(going_on)
    functions.wait()
    finished = prepared(storage, functions, epochs=epochs)
    assert finished.has_finished
    result = launch(finished)
    assert result.bill.earlier_usd == going_on.account.spent_usd
    assert result.bill.functions == 6
    assert len(result.losses) == 3 * epochs
