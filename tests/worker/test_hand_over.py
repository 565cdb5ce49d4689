"""A worker that leaves in time says all it has to say, however quick its successor is."""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from funcpipe.client.follow.launch import upload
from funcpipe.core import Events, FaultTolerance, HandOver, Invocation, Outcome, WorkerReport, WorkerSpec
from funcpipe.core.backoff import Backoff
from funcpipe.errors import PlatformBusy, PlatformRefused
from funcpipe.platforms.base import OPEN, Gate, Handle, Invoked
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.documents import get_document, put_document
from funcpipe.runstate.generations import write_payload
from funcpipe.runstate.halt import read_halt
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease
from funcpipe.runstate.reader import worker_reports
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker import hand_over, setup
from funcpipe.worker.attempt import run_attempt
from funcpipe.worker.hand_over import await_predecessor
from tests.e2e import small
from tests.in_process import make_job, prepared_run
from tests.recording import Recording
from tests.run_documents import BEAT
from tests.support.run_keys import NONCE, signed_for_tests

KEYS = Keys("run-1", 0, NONCE)
WORKER = "s0.r0"


class QuickSuccessor(MemoryStorage):
    """A storage where the next attempt has begun by the time that the one before has said that it leaves."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        super().put(key, data, if_absent=if_absent, gate=gate)
        if key == KEYS.hand_over(WORKER, 0):
            Lease(signed_for_tests(self), KEYS, WORKER, 1, fresh_s=1.0).take()


def first_attempt(storage: MemoryStorage, platform: Recording, *, epochs: int = 100, **faults: Any) -> WorkerSpec:
    """The only worker of a run. Its function lives so long that it leaves only where a test says so."""
    torch.manual_seed(0)
    job = make_job(
        small.model(),
        small.plan(stages=1, replicas=1),
        small.data,
        loss=nn.functional.cross_entropy,
        optimizer=small.optimizer,
        epochs=epochs,
    )
    faults = {"lifetime_s": 2000.0, "cold_start_s": 1500.0} | faults
    (spec,) = upload(prepared_run(job, storage, platform_url=platform.url, faults=FaultTolerance(**faults)), KEYS)
    write_payload(signed_for_tests(storage), KEYS, spec)
    return spec


def leaves_when(monkeypatch: pytest.MonkeyPatch, is_time: Callable[[], bool]) -> None:
    """It is time to start a successor from the first step on, and to leave as soon as the test says."""
    monkeypatch.setattr(hand_over, "leaves_at_s", lambda *_: 0.0 if is_time() else 1000.0)
    monkeypatch.setattr(hand_over.Successor, "_ends_s", lambda *_: math.inf)  # the run lasts longer than the function
    monkeypatch.setattr(hand_over, "_PAUSES", Backoff(first_s=0.1, most_s=0.1, draw=lambda: 0.0))


def test_a_worker_that_hands_over_is_not_cut_short_by_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, platform = QuickSuccessor(), Recording()
    leaves_when(monkeypatch, lambda: bool(platform.invoked))
    spec = first_attempt(storage, platform)
    own = signed_for_tests(storage)
    assert run_attempt(spec, storage, platform.open, invoked=Invoked())
    successor = platform.invoked[-1]
    assert isinstance(successor, WorkerSpec)
    assert replace(successor, account=spec.account, follows_within_s=None) == replace(spec, attempt=1)
    step = get_document(own, HandOver, KEYS.hand_over(WORKER, 0)).step
    report = get_document(own, WorkerReport, KEYS.worker_report(WORKER, 0))
    assert report.outcome is Outcome.HANDED_OVER
    events = get_document(own, Events, KEYS.trace(WORKER, 0)).events
    assert max(event.step for event in events) == step - 1


def test_a_worker_whose_successor_cannot_be_started_tries_again_and_leaves_in_good_order_without(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, platform = MemoryStorage(), Recording(fails=True)
    leaves_when(monkeypatch, lambda: "try 2: no room" in caplog.text)
    spec = first_attempt(storage, platform)
    assert run_attempt(spec, storage, platform.open, invoked=Invoked())
    own = signed_for_tests(storage)
    assert platform.invoked == []
    assert [text for text in caplog.messages if "try 2: no room" in text]
    step = get_document(own, HandOver, KEYS.hand_over(WORKER, 0)).step
    assert f"leaves after step {step} without a successor" in caplog.text
    assert get_document(own, WorkerReport, KEYS.worker_report(WORKER, 0)).outcome is Outcome.HANDED_OVER
    assert Checkpoints(own, KEYS).index().common_step(1, 1) == step


def test_a_successor_that_could_not_be_started_at_first_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class BusyAtFirst(Recording):
        refused = 0

        def invoke(self, worker: Invocation) -> Handle:
            if self.refused < 2:
                self.refused += 1
                raise PlatformRefused("no room") if self.refused == 1 else PlatformBusy("no room")
            return super().invoke(worker)

    storage, platform = MemoryStorage(), BusyAtFirst()
    leaves_when(monkeypatch, lambda: bool(platform.invoked))
    spec = first_attempt(storage, platform)
    assert run_attempt(spec, storage, platform.open, invoked=Invoked())
    (successor,) = platform.invoked
    assert isinstance(successor, WorkerSpec)
    assert successor.attempt == 1
    assert platform.refused == 2


def test_the_first_function_of_a_worker_may_hand_over_before_the_end_of_its_life() -> None:
    storage, platform = MemoryStorage(), Recording()
    spec = replace(first_attempt(storage, platform, lifetime_s=900.0, cold_start_s=12.0), first_life=0.5)
    assert setup._lifetime_s(spec, Invoked(lifetime_s=800.0)) == 400.0
    assert setup._lifetime_s(replace(spec, attempt=1), Invoked(lifetime_s=800.0)) == 800.0
    assert setup._lifetime_s(replace(spec, faults=FaultTolerance()), Invoked()) is None


def test_a_worker_that_will_have_finished_in_time_starts_no_successor() -> None:
    storage, platform = MemoryStorage(), Recording()
    spec = first_attempt(storage, platform, epochs=1, lifetime_s=20.0, cold_start_s=12.0)
    assert run_attempt(spec, storage, platform.open, invoked=Invoked(at_s=time.monotonic() - 3.0))
    assert platform.invoked == []
    report = get_document(signed_for_tests(storage), WorkerReport, KEYS.worker_report(WORKER, 0))
    assert report.outcome is Outcome.FINISHED


def test_functions_that_start_functions_end_at_last() -> None:
    storage, platform = MemoryStorage(), Recording()
    spec = replace(first_attempt(storage, platform, epochs=1, max_attempts=3), attempt=3)
    assert not run_attempt(spec, storage, platform.open, invoked=Invoked())
    own = signed_for_tests(storage)
    report = get_document(own, WorkerReport, KEYS.worker_report(WORKER, 3))
    said = "has had 3 functions, as many as FaultTolerance.max_attempts allows; resume the run"
    assert said in str(report.error)
    halt = read_halt(own, KEYS)
    assert halt is not None
    assert said in halt.reason
    last = replace(spec, attempt=2)
    storage.delete_many(storage.list(f"{KEYS.prefix}leases/") + storage.list(f"{KEYS.prefix}halt"))
    assert run_attempt(last, storage, platform.open, invoked=Invoked())


def test_a_successor_takes_over_from_a_predecessor_whose_word_was_cut_short() -> None:
    storage = MemoryStorage()
    spec = replace(first_attempt(storage, Recording(), epochs=1), attempt=1, follows_within_s=600.0)
    storage.put(KEYS.hand_over(WORKER, 0), b"{")
    await_predecessor(spec, signed_for_tests(storage), KEYS)


@pytest.mark.parametrize("ended", [None, Outcome.FINISHED])
@pytest.mark.parametrize("watches", [True, False])
def test_a_successor_that_will_never_be_the_worker_does_not_wait(watches: bool, ended: Outcome | None) -> None:
    """The attempt before lost its lease to a restart by its client, which has the successor's number; or it has ended
    the worker, as no other hand-over was needed. Neither hands over.
    """
    storage = MemoryStorage()
    spec = replace(first_attempt(storage, Recording(), epochs=1, lease_s=600.0), attempt=1, follows_within_s=600.0)
    own = signed_for_tests(storage)
    storage.watches = watches
    lease = Lease(own, KEYS, WORKER, 1 if ended is None else 0, fresh_s=1.0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(run_attempt, spec, storage, Recording().open, invoked=Invoked())
        lease.take()
        if ended is not None:
            lease.close(ended)
        assert waiting.result(timeout=20.0)
    assert worker_reports(own, KEYS) == ()


def test_what_is_left_of_functions_that_handed_over_are_leases_bills_and_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage, platform = MemoryStorage(), Recording()
    started = 0
    leaves_when(monkeypatch, lambda: len(platform.invoked) > started)
    spec = first_attempt(storage, platform)
    for started in range(6):
        assert run_attempt(spec, storage, platform.open, invoked=Invoked())
        successor = platform.invoked[started]
        assert isinstance(successor, WorkerSpec)
        spec = successor
    own = signed_for_tests(storage)
    assert [report.outcome for report in worker_reports(own, KEYS)] == 6 * [Outcome.HANDED_OVER]
    attempts = {
        folder: [key.rpartition("/")[2] for key in storage.list(f"{KEYS.prefix}{folder}/{WORKER}/")]
        for folder in ("leases", "reports", "traces", "heartbeats", "hand-overs", "progress", "functions")
    }
    for folder in ("leases", "reports", "traces"):
        assert attempts[folder] == [f"{attempt:08d}" for attempt in range(6)]
    assert len(attempts["functions"]) == 6
    assert (attempts["heartbeats"], attempts["hand-overs"]) == (["00000005"], ["00000004", "00000005"])
    assert len(attempts["progress"]) == 2


def test_the_heartbeat_of_a_function_that_left_no_report_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is all that is known of what that function has asked the storage."""
    storage, platform = MemoryStorage(), Recording()
    leaves_when(monkeypatch, lambda: bool(platform.invoked))
    spec = replace(first_attempt(storage, platform), attempt=2)
    own = signed_for_tests(storage)
    put_document(own, KEYS.heartbeat(WORKER, 1), BEAT)
    assert run_attempt(spec, storage, platform.open, invoked=Invoked())
    assert len(storage.list(KEYS.heartbeats(WORKER))) == 2
