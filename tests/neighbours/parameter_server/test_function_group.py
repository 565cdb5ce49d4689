"""Whole runs around a parameter server whose workers are functions."""

import math
import threading
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from funcpipe.client.prepare.job import Job
from funcpipe.core import RequestCounts
from funcpipe.core.backoff import Backoff
from funcpipe.errors import CorruptMessage, WorkerFailed
from funcpipe.neighbours.parameter_server import function_pool, function_worker
from funcpipe.neighbours.parameter_server.function_connection import (
    Arrivals,
    FunctionConnection,
    FunctionMessage,
    Given,
    packed,
    unpacked,
)
from funcpipe.neighbours.parameter_server.function_group import FunctionWorkerGroup
from funcpipe.neighbours.parameter_server.function_pool import FunctionPool
from funcpipe.neighbours.parameter_server.loops import History, LoopConfig, train_asynchronously, train_synchronously
from funcpipe.neighbours.parameter_server.server import Replica, ServerJob
from funcpipe.neighbours.parameter_server.worker_group import Chunk, Push
from funcpipe.platforms import base, function_group
from funcpipe.platforms.base import Invoked
from funcpipe.testing import thread_platform
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from tests.neighbours.parameter_server.functions import Jump, group_of, no_faults, wait_for_all
from tests.neighbours.parameter_server.test_loops import assert_same, plain

Stored = tuple[Job, ServerJob, MemoryStorage]


def assert_same_parameters(found: Mapping[str, Tensor], job: Job) -> None:
    assert_same(found, plain(job))


def test_nothing_that_was_read_is_left(stored: Stored) -> None:
    job, storage = stored[0], MemoryStorage()
    with group_of(job, 1.0, 1.0, storage=storage) as group:
        train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), History())
    assert [key for key in storage.list("") if "/work/" in key or "/pushes/" in key] == []
    assert len([key for key in storage.list("") if "/server/parameters/" in key]) == 1


def test_a_killed_function_is_followed_by_another_and_changes_no_bit(stored: Stored) -> None:
    job, history = stored[0], History()

    def faults_of(number: int) -> FunctionFaults:
        return FunctionFaults(killed_writing=("/pushes/", 3)) if number == 1 else FunctionFaults()

    with group_of(job, 1.0, 1.0, faults_of=faults_of) as group:
        train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs, watch=wait_for_all), history)
        found, used = group.state_dict(), group.used()
    assert history.lost == ["f1: killed by SIGKILL"]
    assert used["f1"].functions == 2
    assert used["f0"].functions == 1
    assert "f1" in history.computed_by[-1]
    assert_same_parameters(found, job)


class WorkTime:
    """A clock of each thread's own, by which time passes in what functions compute: a second for each order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._threads = threading.local()
        for module in (function_worker, base):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self))
        monkeypatch.setattr(function_worker, "Arrivals", partial(Arrivals, clock=self))  # no time passes in waiting
        monkeypatch.setattr(thread_platform, "_Function", partial(thread_platform._Function, invoked=Invoked(at_s=0.0)))
        work = Replica.work

        def slowly(replica: Replica, version: int, parameters: Mapping[str, Tensor], chunk: Chunk) -> Push:
            self._threads.now_s = self() + 1.0
            return work(replica, version, parameters, chunk)

        monkeypatch.setattr(Replica, "work", slowly)

    def __call__(self) -> float:
        return getattr(self._threads, "now_s", 0.0)


@pytest.mark.parametrize("next_one", ["is ready in time", "is late", "has no room"])
def test_functions_whose_life_ends_hand_over(next_one: str, stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an order the next function starts beside it; if it is not there after another one, the first one leaves."""
    job, history, clock = stored[0], History(), WorkTime(monkeypatch)
    if next_one == "has no room":
        monkeypatch.setattr(FunctionPool, "_needs_successor", lambda *_: False)
    watch = partial(wait_for_all, successors=next_one == "is ready in time")
    with group_of(job, 1.0, 1.0, lifetime_s=3.8, clock=clock) as group:
        train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs, watch=watch), history)
        used = group.used()
        found = group.state_dict()
    assert history.lost == []
    assert all(worker.functions > 2 for worker in used.values())
    assert len(history.losses) == job.steps
    assert all(step.keys() == {"f0", "f1"} for step in history.computed_by)
    assert_same_parameters(found, job)


@pytest.mark.parametrize("push", [1, 2])
def test_asynchronous_functions_apply_each_sample_once(stored: Stored, push: int) -> None:
    job, history = stored[0], History()

    def faults_of(number: int) -> FunctionFaults:
        return FunctionFaults(killed_writing=("/pushes/", 3)) if number == 0 else FunctionFaults()

    with group_of(job, 1.0, 1.0, 1.0, push=push, faults_of=faults_of) as group:
        train_asynchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), history)
        progress = group.progress()
    assert [line.partition(":")[0] for line in history.lost] == ["f0"]
    assert sum(record.samples for record in history.pushes) == job.epochs * job.samples
    assert progress.samples == job.epochs * job.samples
    assert progress.version == len(history.pushes)
    assert progress.beyond == ()


def test_a_worker_whose_functions_always_die_is_given_up_and_the_others_go_on(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, history = stored[0], History()
    doomed = {1}

    def faults_of(number: int) -> FunctionFaults:
        if number in doomed or number > 1:
            return FunctionFaults(killed_writing=("/pushes/", 2))
        return no_faults(number)

    quick(monkeypatch)
    with group_of(job, 1.0, 1.0, faults_of=faults_of) as group:
        train_synchronously(group, LoopConfig(batches=job.batches, epochs=5, watch=wait_for_all), history)
        used = group.used()
    assert used["f1"].functions == 6
    assert len(history.lost) == 6
    assert len(history.losses) == 5 * job.steps // job.epochs


def test_without_any_function_left_training_ends_and_says_so(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    job = stored[0]
    quick(monkeypatch)
    with (
        pytest.raises(WorkerFailed, match="no worker is left; the last was lost: f0: killed by SIGKILL"),
        group_of(job, 1.0, faults_of=lambda number: FunctionFaults(killed_writing=("/pushes/", 2))) as group,
    ):
        train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), History())


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions are started again without a pause."""
    for module in (function_group, function_pool):
        monkeypatch.setattr(module, "RESTART_PAUSES", Backoff(first_s=0.001, most_s=0.001))
    monkeypatch.setattr(function_pool, "_POLL_S", 0.01)


def test_an_error_of_the_model_ends_the_run_with_its_traceback(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Replica, *arguments: object) -> None:
        raise ValueError("the target is out of range")

    monkeypatch.setattr(Replica, "work", fail)
    job = stored[0]
    with (
        pytest.raises(WorkerFailed, match=r"worker f\d failed: ValueError: the target is out of range\n.*Traceback"),
        group_of(job, 1.0, 1.0) as group,
    ):
        train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), History())


def test_a_new_group_goes_on_from_the_checkpoint_of_one_before(stored: Stored) -> None:
    job, storage, config = stored[0], MemoryStorage(), LoopConfig(batches=stored[0].batches, epochs=1)
    with group_of(job, 1.0, 1.0, storage=storage) as group:
        train_synchronously(group, config, History())
        group.save()
    with group_of(job, 1.0, storage=storage, generation=1) as group:
        history = History()
        train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), history)
        found = group.state_dict()
    assert len(history.losses) == job.steps // 2
    assert_same_parameters(found, job)


def test_an_invocation_that_is_lost_is_made_again(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as lost when the other function is ready and a minute is over."""
    quick(monkeypatch)
    job, history, clock = stored[0], History(), Jump()
    ready, receive = list[FunctionConnection](), FunctionConnection.receive

    def noted(connection: FunctionConnection, message: FunctionMessage) -> Given | None:
        ready.append(connection)
        return receive(connection, message)

    monkeypatch.setattr(FunctionConnection, "receive", noted)
    clock.happened = lambda: bool(ready)
    with group_of(job, 1.0, 1.0, lost=frozenset({0}), clock=clock) as group:
        train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), history)
        found, used = group.state_dict(), group.used()
    assert history.lost == ["f0: its function was not ready 60 s after it was invoked"]
    assert used["f0"].functions == 2
    assert_same_parameters(found, job)


def test_a_function_that_sleeps_is_given_up_and_followed_by_another(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is over when it is the only one from which an answer is missing."""
    quick(monkeypatch)
    job, history, clock = stored[0], History(), Jump()
    sleeper = FunctionFaults(sleeps_at=12, sleeps_s=30.0)

    def faults_of(number: int) -> FunctionFaults:
        return sleeper if number == 1 else FunctionFaults()

    def is_awaited(group: FunctionWorkerGroup) -> bool:
        return not sleeper.awake.is_set() and [
            connection.spec.worker for connection in group._pool.connections if connection.given
        ] == ["f1"]

    with group_of(job, 1.0, 1.0, faults_of=faults_of, clock=clock) as group:
        clock.happened = lambda: is_awaited(group)
        train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), history)
        found = group.state_dict()
    assert history.lost == ["f1: its function has not answered for 60 s (message_deadline_s)"]
    assert_same_parameters(found, job)


def test_functions_that_are_out_of_memory_end_the_run_and_say_what_to_do(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Replica, *arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Replica, "work", fail)
    job = stored[0]
    with (
        pytest.raises(WorkerFailed, match="a function of 1024 MB, holds the whole model and has run out of memory"),
        group_of(job, 1.0) as group,
    ):
        train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), History())


def test_storage_that_tells_nothing_is_asked_until_answers_are_there(stored: Stored) -> None:
    class Silent(MemoryStorage):
        watches = False

        def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
            cancel.wait(timeout_s)

    job, history = stored[0], History()
    with group_of(job, 1.0, 1.0, storage=Silent()) as group:
        train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), history)
        found = group.state_dict()
    assert_same_parameters(found, job)


def test_messages_are_whole_or_refused() -> None:
    message = FunctionMessage(number=3, billed_s=1.5, requests=RequestCounts(puts=2), loss_sums=(0.1, float("nan")))
    vectors = (torch.tensor([0.1, 1e-300], dtype=torch.float64), torch.zeros(0))
    data = packed(message, vectors)
    found, tensors = unpacked(data, source="x")
    assert found.loss_sums[0] == 0.1
    assert math.isnan(found.loss_sums[1])
    assert found.requests == RequestCounts(puts=2)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, vectors, strict=True))
    for broken in (b"", data[:3], data[:10], data[:-1], packed(message)):
        with pytest.raises(CorruptMessage, match="x"):
            unpacked(broken, source="x")
