"""One attempt of a worker from its invocation to its report, in this process: how it ends, and what it logs of that."""

import logging
import sys
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import nn

from funcpipe.client.follow.launch import upload
from funcpipe.core import FaultTolerance, Halt, HandOver, Heartbeat, LeaseDocument, Outcome, WorkerReport, WorkerSpec
from funcpipe.errors import StorageBusy
from funcpipe.platforms.base import OPEN, Gate, Invoked
from funcpipe.runstate.documents import get_document, put_document
from funcpipe.runstate.generations import write_payload
from funcpipe.runstate.halt import read_halt
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker.attempt import run_attempt
from tests.e2e import small
from tests.in_process import make_job, prepared_run
from tests.recording import Recording
from tests.support.run_keys import NONCE, signed_for_tests

S = TypeVar("S", bound=MemoryStorage)
KEYS = Keys("run-1", 0, NONCE)
WORKER = "s0.r0"
FAULTS = FaultTolerance(checkpoint_steps=4, heartbeat_s=0.001)


def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise ValueError("the loss function fails")


def prints_a_page(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise ValueError("<html>" + 10_000_000 * "x" + "</html>")


def exits(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    sys.exit(3)


def exhausts(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Uploaded:
    """A run of one worker, which each test begins anew."""

    def __init__(self) -> None:
        self._storage = MemoryStorage()
        torch.manual_seed(0)
        self._specs: dict[str, WorkerSpec] = {}
        own = (("fails", fails), ("exits", exits), ("page", prints_a_page), ("exhausts", exhausts))
        losses = (("trains", nn.functional.cross_entropy), *own)
        for name, loss in losses:
            plan = small.plan(stages=1, replicas=1)
            job = make_job(small.model(), plan, small.data, loss=loss, optimizer=small.optimizer)
            keys = Keys("run-1", len(self._specs), NONCE)
            prepared = prepared_run(job, self._storage, platform_url=Recording().url, faults=FAULTS)
            (self._specs[name],) = upload(prepared, keys)
            write_payload(signed_for_tests(self._storage), keys, self._specs[name])

    def spec(self, name: str = "trains") -> WorkerSpec:
        return replace(self._specs[name], generation=0)

    def fill(self, storage: S) -> S:
        for key in self._storage.list(""):
            storage.put(key, self._storage.get(key))
        return storage


@pytest.fixture(scope="module")
def uploaded() -> Uploaded:
    return Uploaded()


def lines(caplog: pytest.LogCaptureFixture, level: int) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno == level)


def run(
    spec: WorkerSpec, storage: MemoryStorage, caplog: pytest.LogCaptureFixture, platform: Recording | None = None
) -> bool:
    caplog.set_level(logging.DEBUG, logger="funcpipe")
    return run_attempt(spec, storage, (platform or Recording()).open, invoked=Invoked())


def report(storage: MemoryStorage, attempt: int = 0) -> WorkerReport:
    return get_document(signed_for_tests(storage), WorkerReport, KEYS.worker_report(WORKER, attempt))


def test_a_worker_that_trains_to_the_end_logs_its_lease_checkpoints_and_end(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    storage = uploaded.fill(MemoryStorage())
    assert run(uploaded.spec(), storage, caplog)
    found = report(storage)
    assert (found.outcome, found.first_step) == (Outcome.FINISHED, 0)
    assert {"start", "compute", "saving"} <= found.uses.keys() <= {"start", "compute", "loading", "bubble", "saving"}
    assert sum(found.uses.values()) == pytest.approx(found.alive_s)
    told = lines(caplog, logging.INFO)
    for event in ("loaded the code", "took the lease", "starts at step 0 of 16", "saved stage 0 after step 4 as 0000"):
        assert event in told
    assert "ends: finished" in told
    assert "ran " in lines(caplog, logging.DEBUG)
    assert not lines(caplog, logging.WARNING)


def test_a_later_attempt_restores_the_checkpoint_and_logs_from_which_step(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    storage = uploaded.fill(MemoryStorage())
    put_document(signed_for_tests(storage), KEYS.halt, Halt(reason="enough", step=6))
    assert run(uploaded.spec(), storage, caplog)
    assert report(storage).outcome is Outcome.HALTED
    assert "obeys the order to end after step 6: enough" in lines(caplog, logging.INFO)
    for key in (KEYS.halt, KEYS.verdict(0), KEYS.lease(WORKER, 1)):  # as if it had died before it ended for good
        storage.delete(key)
    storage.put(KEYS.message(WORKER, 3, "put-old"), b"left by the attempt before")
    assert run(replace(uploaded.spec(), attempt=1), storage, caplog)
    told = lines(caplog, logging.INFO)
    assert "restored the checkpoint after step 6" in told
    assert "starts at step 6 of 16" in told
    assert report(storage, 1).outcome is Outcome.FINISHED


def test_an_attempt_that_was_superseded_writes_no_report_and_logs_by_whom(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    storage = uploaded.fill(MemoryStorage())
    put_document(signed_for_tests(storage), KEYS.lease(WORKER, 1), LeaseDocument(holder="a later attempt"))
    assert run(uploaded.spec(), storage, caplog)
    assert not storage.list(KEYS.worker_reports)
    assert "lost the lease: attempt 1 of s0.r0 has begun" in lines(caplog, logging.WARNING)
    assert "ends without a report" in lines(caplog, logging.WARNING)


def test_an_order_to_end_at_once_ends_the_worker_in_the_midst_of_a_step(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    storage = uploaded.fill(MemoryStorage())
    put_document(signed_for_tests(storage), KEYS.halt, Halt(reason="enough"))
    assert run(replace(uploaded.spec(), epochs=10_000), storage, caplog)
    assert report(storage).outcome is Outcome.HALTED
    assert "the run is to end at once: enough" in lines(caplog, logging.INFO)
    assert "ends at once: enough" in lines(caplog, logging.WARNING)


def test_a_failure_is_logged_with_its_task_and_cause_and_ends_the_run(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    storage = uploaded.fill(MemoryStorage())
    assert not run(uploaded.spec("fails"), storage, caplog)
    assert "failed: forward.s0.r0.m0" in lines(caplog, logging.ERROR)
    assert "the loss function fails" in lines(caplog, logging.ERROR)
    found = report(storage)
    assert (found.outcome, found.task, found.retryable) == (Outcome.FAILED, "forward.s0.r0.m0", False)
    assert found.uses.keys() == {"start", "lost", "saving"}  # its only step did not end
    assert sum(found.uses.values()) == pytest.approx(found.alive_s)
    halt = read_halt(signed_for_tests(storage), KEYS)
    assert halt is not None
    assert "ValueError: the loss function fails" in halt.reason
    assert f"ordered the run to end at once: {halt.reason}" in lines(caplog, logging.WARNING)


def test_ten_megabytes_in_an_exception_enter_neither_the_report_nor_the_order_to_end(uploaded: Uploaded) -> None:
    logging.getLogger("funcpipe").propagate = False  # to pytest, which would keep all of it
    storage = uploaded.fill(MemoryStorage())
    assert not run_attempt(uploaded.spec("page"), storage, Recording().open, invoked=Invoked())
    left = {key: len(storage.get(key)) for key in (KEYS.worker_report(WORKER, 0), KEYS.halt)}
    assert left[KEYS.worker_report(WORKER, 0)] < 20_000
    assert left[KEYS.halt] < 10_000
    found = report(storage)
    for text in (str(found.error), str(found.traceback).rstrip()):
        assert "<html>xxx" in text
        assert text.endswith("xxx</html>")
    assert "in prints_a_page" in str(found.traceback)


def test_a_device_without_memory_ends_as_a_function_without_it(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    storage = uploaded.fill(MemoryStorage())
    assert not run(uploaded.spec("exhausts"), storage, caplog)
    found = report(storage)
    assert (found.outcome, found.out_of_memory, found.is_final) == (Outcome.FAILED, True, False)
    assert "CUDA out of memory" in str(found.error)
    assert (found.peak_device_bytes, found.exhausted_device_mb) == (0, None), "the function had no accelerator"


def test_sys_exit_in_the_user_s_code_is_a_failure_that_is_called_that(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    storage = uploaded.fill(MemoryStorage())
    assert not run(uploaded.spec("exits"), storage, caplog)
    found = report(storage)
    assert (found.outcome, found.task, found.retryable) == (Outcome.FAILED, "forward.s0.r0.m0", False)
    assert str(found.error).startswith("SystemExit: your code has called sys.exit(3)")
    assert "in exits" in str(found.traceback)
    assert "in exits" in caplog.text


class SupersededLater(MemoryStorage):
    """A storage where a later attempt begins when this worker has done its fourth step."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        super().put(key, data, if_absent=if_absent, gate=gate)
        if key.startswith(f"{KEYS.checkpoints}s0/00000004") and key.endswith(".json"):
            Lease(signed_for_tests(self), KEYS, WORKER, 1, fresh_s=1.0).take()


def test_a_worker_whose_lease_is_lost_while_it_trains_stops_quietly(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    storage = uploaded.fill(SupersededLater())
    assert run(replace(uploaded.spec(), epochs=10_000), storage, caplog)
    assert not storage.list(KEYS.worker_reports)


class NoHeartbeats(MemoryStorage):
    """A storage that does not take heartbeats."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        if key.startswith(KEYS.heartbeats(WORKER)):
            raise StorageBusy("it is overloaded")
        super().put(key, data, if_absent=if_absent, gate=gate)


def test_a_worker_gives_up_after_several_heartbeats_that_fail(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    storage = uploaded.fill(NoHeartbeats())
    assert not run(replace(uploaded.spec(), epochs=10_000), storage, caplog)
    found = report(storage)
    assert (found.outcome, found.retryable) == (Outcome.FAILED, True)
    assert "failed, 5 of 5: it is overloaded" in lines(caplog, logging.WARNING)
    assert read_halt(signed_for_tests(storage), KEYS) is None


def test_a_reached_limit_ends_the_run_after_a_step_that_all_hear_of(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    storage = uploaded.fill(MemoryStorage())
    spec = uploaded.spec()
    spent = replace(spec.account, spent_usd=0.99, run_usd_s=1.0)
    limits = replace(spec.limits, max_usd=1.0)
    assert run(replace(spec, epochs=10_000, account=spent, limits=limits), storage, caplog)
    assert report(storage).outcome is Outcome.HALTED
    assert "it would cost more than $1" in lines(caplog, logging.WARNING)


def test_a_successor_takes_over_from_the_step_that_was_handed_over(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    storage = uploaded.fill(MemoryStorage())
    put_document(signed_for_tests(storage), KEYS.hand_over(WORKER, 0), HandOver(step=0))
    assert run(replace(uploaded.spec(), attempt=1, follows_within_s=60.0), storage, caplog)
    assert "takes over after step 0" in lines(caplog, logging.INFO)
    assert get_document(signed_for_tests(storage), Heartbeat, KEYS.heartbeat(WORKER, 1)).step == 16


def test_a_successor_that_nobody_hands_over_to_takes_over_when_the_life_before_is_over(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    storage = uploaded.fill(MemoryStorage())
    assert run(replace(uploaded.spec(), attempt=1, follows_within_s=1e-3), storage, caplog)
    assert "has not handed over within" in lines(caplog, logging.WARNING)
    assert report(storage, 1).outcome is Outcome.FINISHED


def test_a_function_near_the_end_of_its_lifetime_starts_a_successor_and_hands_over(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    storage, platform = uploaded.fill(MemoryStorage()), Recording()
    spec = replace(uploaded.spec(), faults=replace(FAULTS, lifetime_s=0.5, cold_start_s=0.1), epochs=10_000)
    assert run(spec, storage, caplog, platform)
    told = lines(caplog, logging.INFO)
    assert "hand-over begins, at an age of" in told
    assert "started function function 1 as attempt 1 of worker s0.r0" in told
    assert "handed over to attempt 1 after step" in told
    assert report(storage).outcome is Outcome.HANDED_OVER
    (successor,) = platform.invoked
    assert isinstance(successor, WorkerSpec)
    assert successor.attempt == 1


def test_a_function_that_is_late_from_the_start_does_a_step_before_it_leaves(
    uploaded: Uploaded, caplog: pytest.LogCaptureFixture
) -> None:
    storage, platform = uploaded.fill(MemoryStorage()), Recording()
    spec = replace(uploaded.spec(), faults=replace(FAULTS, lifetime_s=1e-3))
    assert run(spec, storage, caplog, platform)
    assert report(storage).outcome is Outcome.HANDED_OVER
    assert [invoked.attempt for invoked in platform.invoked if isinstance(invoked, WorkerSpec)] == [1]
    assert get_document(signed_for_tests(storage), HandOver, KEYS.hand_over(WORKER, 0)).step == 1
