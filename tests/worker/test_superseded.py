"""A function that wakes up after another one has become its worker says nothing that anybody believes."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

from funcpipe.client.control.verdict import final_failures, first_failure
from funcpipe.client.follow.launch import upload
from funcpipe.core import FaultTolerance, Outcome, WorkerSpec
from funcpipe.platforms.base import OPEN, Gate, Invoked
from funcpipe.runstate.halt import read_halt
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease, last_attempt
from funcpipe.runstate.liveness import newest_heartbeat
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker.attempt import run_attempt
from tests.e2e import small
from tests.in_process import make_job, prepared_run
from tests.recording import Recording
from tests.support.run_keys import NONCE, signed_for_tests
from tests.worker.test_attempt import fails

KEYS = Keys("run-1", 0, NONCE)
WORKER = "s0.r0"
FAULTS = FaultTolerance(checkpoint_steps=4, heartbeat_s=0.01)


class Superseded(MemoryStorage):
    """A storage where attempt 1 of the worker begins at the first put of a key that begins with `at`."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at: str | None = at

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        if self.at is not None and key.startswith(self.at):
            self.at = None
            Lease(signed_for_tests(self), KEYS, WORKER, 1, fresh_s=1.0).take()
        super().put(key, data, if_absent=if_absent, gate=gate)


@functools.cache
def uploaded(what: str) -> tuple[WorkerSpec, dict[str, bytes]]:
    """The first worker of a run that `what`, and the objects of the run."""
    torch.manual_seed(0)
    storage = MemoryStorage()
    plan = small.plan(stages=1, replicas=2 if what == "waits too long" else 1)
    loss = fails if what == "fails" else nn.functional.cross_entropy
    job = make_job(small.model(), plan, small.data, loss=loss, optimizer=small.optimizer, deadline_s=0.05)
    spec = next(iter(upload(prepared_run(job, storage, platform_url=Recording().url, faults=FAULTS), KEYS)))
    return spec, {key: storage.get(key) for key in storage.list("")}


def run(what: str, at: str) -> Superseded:
    spec, objects = uploaded(what)
    storage = Superseded(at)
    for key, data in objects.items():
        storage.put(key, data)
    assert run_attempt(spec, storage, Recording().open, invoked=Invoked())
    return storage


@pytest.mark.parametrize("what", ["fails", "waits too long", "finishes"])
@pytest.mark.parametrize("at", ["report", "last entry"])
def test_nobody_believes_how_a_superseded_attempt_has_ended(what: str, at: str) -> None:
    keys = {"report": KEYS.worker_report(WORKER, 0), "last entry": KEYS.lease(WORKER, 1)}
    storage = run(what, keys[at])
    last = last_attempt(signed_for_tests(storage), KEYS, WORKER)
    assert last is not None
    assert (last.attempt, last.ended) == (1, None)
    assert storage.list(KEYS.worker_reports)  # it was written in the sleep between check and put
    assert final_failures(signed_for_tests(storage), KEYS) == []
    assert "is not told" in str(first_failure(signed_for_tests(storage), KEYS, "is not told"))
    assert read_halt(signed_for_tests(storage), KEYS) is None


@pytest.mark.parametrize("what", ["fails", "waits too long"])
def test_an_attempt_that_knows_it_was_superseded_does_not_even_report(what: str) -> None:
    at = KEYS.heartbeat(WORKER, 0) if what == "waits too long" else KEYS.lease(WORKER, 0)
    storage = run(what, at)
    assert not storage.list(KEYS.worker_reports)
    assert read_halt(signed_for_tests(storage), KEYS) is None


@pytest.mark.parametrize("what", ["fails", "waits too long", "finishes"])
def test_an_attempt_that_was_not_superseded_ends_the_worker_for_good(what: str) -> None:
    storage = MemoryStorage()
    spec, objects = uploaded(what)
    for key, data in objects.items():
        storage.put(key, data)
    assert run_attempt(spec, storage, Recording().open, invoked=Invoked()) is (what == "finishes")
    last = last_attempt(signed_for_tests(storage), KEYS, WORKER)
    assert last is not None
    assert (last.attempt, last.ended) == (0, Outcome.FINISHED if what == "finishes" else Outcome.FAILED)
    halt = read_halt(signed_for_tests(storage), KEYS)
    assert (halt is None) is (what == "finishes")
    assert run_attempt(dataclasses.replace(spec, attempt=1), storage, Recording().open, invoked=Invoked())
    assert last_attempt(signed_for_tests(storage), KEYS, WORKER) == last


def test_the_heartbeat_of_a_superseded_attempt_stays_and_replaces_none() -> None:
    storage = MemoryStorage()
    spec, objects = uploaded("finishes")
    for key, data in objects.items():
        storage.put(key, data)
    storage.put(KEYS.heartbeat(WORKER, 0), b"of the attempt before")
    assert run_attempt(dataclasses.replace(spec, attempt=1), storage, Recording().open, invoked=Invoked())
    assert storage.get(KEYS.heartbeat(WORKER, 0)) == b"of the attempt before"
    storage.put(KEYS.heartbeat(WORKER, 0), b"written when it woke up")
    beat = newest_heartbeat(signed_for_tests(storage), KEYS, WORKER)
    assert beat is not None
    assert (beat.attempt, beat.step) == (1, 16)
