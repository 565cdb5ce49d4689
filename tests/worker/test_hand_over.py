"""A worker that leaves in time says all it has to say, however quick its successor is."""

from dataclasses import replace

import pytest
import torch

from funcpipe.client.upload import upload
from funcpipe.core import Events, FaultTolerance, HandOver, Outcome, WorkerReport, WorkerSpec
from funcpipe.platforms.base import OPEN, Gate, Invoked
from funcpipe.runstate.documents import get_document
from funcpipe.runstate.generations import write_payload
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.run_keys import NONCE, signed_for_tests
from funcpipe.worker.attempt import run_attempt
from tests.e2e import small
from tests.in_process import make_job, prepared_run
from tests.recording import Recording

KEYS = Keys("run-1", 0, NONCE)
WORKER = "s0.r0"


class QuickSuccessor(MemoryStorage):
    """A storage where the next attempt has begun by the time that the one before has said that it leaves."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        super().put(key, data, if_absent=if_absent, gate=gate)
        if key == KEYS.hand_over(WORKER, 0):
            Lease(signed_for_tests(self), KEYS, WORKER, 1, fresh_s=1.0).take()


@pytest.mark.slow
def test_a_worker_that_hands_over_is_not_cut_short_by_its_successor() -> None:
    storage, platform = QuickSuccessor(), Recording()
    torch.manual_seed(0)
    job = make_job(
        small.model(),
        small.plan(stages=1, replicas=1),
        small.data,
        loss=small.slow_loss,
        optimizer=small.optimizer,
        epochs=100,
    )
    faults = FaultTolerance(lifetime_s=1.5, cold_start_s=0.1)
    (spec,) = upload(prepared_run(job, storage, platform_url=platform.url, faults=faults), KEYS)
    own = signed_for_tests(storage)
    write_payload(own, KEYS, spec)
    assert run_attempt(spec, storage, platform.open, invoked=Invoked())
    successor = platform.invoked[-1]
    assert isinstance(successor, WorkerSpec)
    assert replace(successor, account=spec.account, follows_within_s=None) == replace(spec, attempt=1)
    step = get_document(own, HandOver, KEYS.hand_over(WORKER, 0)).step
    report = get_document(own, WorkerReport, KEYS.worker_report(WORKER, 0))
    assert report.outcome is Outcome.HANDED_OVER
    events = get_document(own, Events, KEYS.trace(WORKER, 0)).events
    assert max(event.step for event in events) == step - 1
