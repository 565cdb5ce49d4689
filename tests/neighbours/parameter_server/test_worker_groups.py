"""What every group does: the same training, whoever computes. Ray's is tested in `test_ray_group`, with nodes."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import pytest
import torch
from torch import Tensor

from funcpipe.client.prepare.job import Job
from funcpipe.errors import CorruptMessage, PlanError
from funcpipe.neighbours.parameter_server.loops import History, LoopConfig, train_asynchronously, train_synchronously
from funcpipe.neighbours.parameter_server.ray_group import SharedLink
from funcpipe.neighbours.parameter_server.server import Applied, ParameterServer, ServerCheckpoints, ServerJob
from funcpipe.neighbours.parameter_server.worker_group import ServerWorker, WorkerGroup
from funcpipe.testing.memory_storage import MemoryStorage
from tests.neighbours.parameter_server.conftest import RUN, stored_adam
from tests.neighbours.parameter_server.functions import group_of
from tests.neighbours.parameter_server.test_loops import assert_same, plain
from tests.support.server_group import InTurnWorkerGroup

Stored = tuple[Job, ServerJob, MemoryStorage]


class TrainedWorkerGroup(WorkerGroup, Protocol):
    """A group that tells what it has trained."""

    def state_dict(self) -> dict[str, Tensor]: ...


Open = Callable[..., AbstractContextManager[TrainedWorkerGroup]]
"""Opens a group with workers of these speeds; `push` is how many micro-batches they sum."""


class InTurn(InTurnWorkerGroup):
    def state_dict(self) -> dict[str, Tensor]:
        return self.server.state_dict()


@pytest.fixture(params=["in turn", "functions"])
def open_group(request: pytest.FixtureRequest, stored: Stored) -> Open:
    """Each kind of group, for the job of `stored`."""
    job, sent, storage = stored

    @contextlib.contextmanager
    def in_turn(*speeds: float, push: int = 1) -> Iterator[TrainedWorkerGroup]:
        workers = [ServerWorker(name=f"f{i}", speed=speed, push=push) for i, speed in enumerate(speeds)]
        yield InTurn(sent, storage, RUN, workers)

    @contextlib.contextmanager
    def functions(*speeds: float, push: int = 1) -> Iterator[TrainedWorkerGroup]:
        with group_of(job, *speeds, push=push) as group:
            yield group

    return in_turn if request.param == "in turn" else functions


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 1.0), (3.0, 1.0), (1.0, 2.0, 0.5, 1.0, 1.0, 1.0)])
def test_synchronous_training_equals_one_process_bit_for_bit(
    open_group: Open, stored: Stored, speeds: tuple[float, ...]
) -> None:
    """Steps of four micro-batches, and a last one of three, of an epoch with 22 samples."""
    job, history = stored[0], History()
    with open_group(*speeds) as group:
        train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), history)
        found = group.state_dict()
    assert len(history.losses) == job.steps
    assert history.lost == []
    assert_same(found, plain(job))


@pytest.mark.parametrize("push", [1, 2])
def test_asynchronous_training_applies_each_sample_once(open_group: Open, stored: Stored, push: int) -> None:
    job, history = stored[0], History()
    with open_group(1.0, 2.0, push=push) as group:
        train_asynchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), history)
        progress = group.progress()
    assert sum(record.samples for record in history.pushes) == progress.samples == job.epochs * job.samples
    assert progress.version == len(history.pushes)
    assert all(0 <= record.staleness < len(history.pushes) for record in history.pushes)


def test_a_worker_with_notice_gets_no_more_work_and_one_that_joins_does(open_group: Open, stored: Stored) -> None:
    job, history = stored[0], History()

    def watch(group: WorkerGroup, done: float) -> None:
        """Replace a worker at half time; the last step begins when the new one has loaded the model."""
        if done >= 0.5 and any(worker.name == "f0" for worker in group.workers):
            group.leave("f0")
            group.join(ServerWorker(name="new", speed=2.0))
        while done >= (job.steps - 1) / job.steps and all(worker.name != "new" for worker in group.workers):
            assert group.next() is None

    with open_group(1.0, 1.0) as group:
        train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs, watch=watch), history)
        found = group.state_dict()
    half = job.steps // 2
    assert all(samples.keys() == {"f0", "f1"} for samples in history.computed_by[:half])
    assert all("f0" not in samples for samples in history.computed_by[half:])
    assert "new" in history.computed_by[-1]
    assert_same(found, plain(job))


def test_a_finished_run_has_nothing_left_to_do(open_group: Open, stored: Stored) -> None:
    job, config = stored[0], LoopConfig(batches=stored[0].batches, epochs=1)
    with open_group(1.0) as group:
        train_synchronously(group, config, History())
        before = group.state_dict()
        history = History()
        train_synchronously(group, config, history)
        after = group.state_dict()
    assert history.losses == []
    assert job.steps == 2 * config.steps
    assert_same(after, before)


FOLDER = f"{RUN}/server/checkpoints/"


def test_a_server_is_read_as_it_was_saved_and_two_checkpoints_are_kept() -> None:
    _, sent, storage = stored_adam()
    server, saved = ParameterServer(sent), ServerCheckpoints(storage, RUN)
    assert not saved.restore_into(server)
    for version in (3, 4, 10):
        server.version, server.applied = version, Applied(version, [version + 2])
        saved.save(server)
    assert len(storage.list(FOLDER)) == 4
    again = ParameterServer(sent)
    assert saved.restore_into(again)
    assert (again.version, again.applied.below, again.applied.beyond) == (10, 10, {12})
    for name, tensor in server.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("field", "value"), [("sha256", "0" * 64), ("settings", "{}"), ("progress", {"version": "x"}), ("aliases", None)]
)
def test_a_damaged_checkpoint_is_told(field: str, value: object) -> None:
    _, sent, storage = stored_adam()
    server, saved = ParameterServer(sent), ServerCheckpoints(storage, RUN)
    saved.save(server)
    (key,) = [key for key in storage.list(FOLDER) if key.endswith(".json")]
    document = json.loads(storage.get(key))
    document[field] = value
    storage.put(key, json.dumps(document).encode())
    with pytest.raises(CorruptMessage):
        saved.restore_into(ParameterServer(sent))


def test_a_step_is_not_taken_while_gradients_are_missing() -> None:
    job, sent, _ = stored_adam()
    (step, *_) = job.batches.epoch(0)
    with pytest.raises(PlanError, match="were not pushed"):
        ParameterServer(sent).update(step, range(4))


def test_applied_ids_are_told_by_a_number_and_what_is_beyond() -> None:
    applied = Applied()
    applied.add([3, 1])
    assert (applied.below, applied.beyond) == (0, {1, 3})
    assert 1 in applied
    assert 0 not in applied
    applied.add([0, 2])
    assert (applied.below, applied.beyond) == (4, set())


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(
    ("link", "own", "seconds"),
    [(10.0, None, 8.0), (None, 20.0, 4.0), (10.0, 20.0, 8.0), (40.0, 20.0, 4.0), (None, None, 0.0)],
)
def test_a_transfer_takes_what_the_narrower_end_allows(link: float | None, own: float | None, seconds: float) -> None:
    clock = Clock()
    SharedLink(link, clock=clock, sleep=clock.sleep).transfer(80, own)
    assert clock() - 100.0 == pytest.approx(seconds)


def test_transfers_at_once_share_the_link() -> None:
    """By a clock that stands still, so that it does not matter when threads run: all pieces pass one after another."""
    slept: list[float] = []
    lock = threading.Lock()

    def sleep(seconds: float) -> None:
        with lock:
            slept.append(seconds)

    link = SharedLink(10.0, clock=lambda: 0.0, sleep=sleep)
    threads = [threading.Thread(target=link.transfer, args=(80,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(slept) == pytest.approx(24.0)
