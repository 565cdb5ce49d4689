"""Whole runs around a parameter server, without Ray."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from funcpipe.client.prepare.job import Job
from funcpipe.errors import WorkerFailed
from funcpipe.neighbours.parameter_server.loops import (
    History,
    LoopConfig,
    counts_by_speed,
    deal,
    train_asynchronously,
    train_synchronously,
)
from funcpipe.neighbours.parameter_server.server import ServerJob
from funcpipe.neighbours.parameter_server.worker_group import Lost, Pushed, ServerWorker
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.plain import train_in_one_process
from tests.neighbours.parameter_server.conftest import RUN, model
from tests.support.server_group import InTurnWorkerGroup

Stored = tuple[Job, ServerJob, MemoryStorage]


def workers(*speeds: float, push: int = 1) -> list[ServerWorker]:
    return [ServerWorker(name=f"w{i}", speed=speed, push=push) for i, speed in enumerate(speeds)]


def plain(job: Job) -> dict[str, Tensor]:
    steps = tuple(job.batches.steps_from(0, job.epochs))
    trained = train_in_one_process(model(), job.graph, job.dataset(), steps, recipe=job.recipe, seed=job.seed)
    return dict(trained.state_dict())


def assert_same_parameters(group: InTurnWorkerGroup, expected: dict[str, Tensor]) -> None:
    assert_same(group.server.state_dict(), expected)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if "running" in name:  # summed in another order by the replicas' way, as in pipelines
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-15)
        else:
            assert torch.equal(found[name], tensor), name


def test_a_lost_worker_changes_no_bit(stored: Stored) -> None:
    job, sent, storage = stored

    def lose(group: InTurnWorkerGroup, worker: str, pushed: int) -> None:
        if pushed == 4 and any(w.name == "w1" for w in group.workers):
            group.kill("w1")

    group, history = InTurnWorkerGroup(sent, storage, RUN, workers(1.0, 1.0, 1.0), before_push=lose), History()
    train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), history)
    assert history.lost == ["w1: its machine was taken back"]
    assert all("w1" not in samples for samples in history.computed_by[2:])
    assert_same_parameters(group, plain(job))


def test_a_lost_server_goes_on_from_its_checkpoint(stored: Stored) -> None:
    job, sent, storage = stored
    done: list[int] = []

    def lose(group: InTurnWorkerGroup, worker: str, pushed: int) -> None:
        if pushed == 11 and not done:
            done.append(pushed)
            group.kill_server()

    group, history = InTurnWorkerGroup(sent, storage, RUN, workers(1.0, 1.0), before_push=lose), History()
    train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs, save_every=2), history)
    assert history.server_restarts == 1
    assert len(history.losses) == job.steps
    assert_same_parameters(group, plain(job))


class StartingLater(InTurnWorkerGroup):
    """A worker that starts is there only when nothing else happens any more."""

    starting: ServerWorker | None = None

    @property
    def is_starting(self) -> bool:
        return self.starting is not None

    def next(self) -> Pushed | Lost | None:
        found = super().next()
        if found is None and self.starting is not None:
            self.join(self.starting)
            self.starting = None
        return found


def test_what_a_leaving_worker_pushes_counts_while_all_others_start(stored: Stored) -> None:
    job, sent, storage = stored

    def change(group: InTurnWorkerGroup, worker: str, pushed: int) -> None:
        assert isinstance(group, StartingLater)
        if pushed == 0 and any(other.name == "w0" for other in group.workers):
            group.leave("w0")
            group.kill("w1")
            group.starting = ServerWorker(name="w2")

    group, history = StartingLater(sent, storage, RUN, workers(1.0, 1.0), before_push=change), History()
    train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), history)
    assert history.computed_by[0] == {"w0": 4, "w2": 4}
    assert_same_parameters(group, plain(job))


def test_without_workers_training_ends_and_says_so(stored: Stored) -> None:
    job, sent, storage = stored
    group = InTurnWorkerGroup(
        sent, storage, RUN, workers(1.0), before_push=lambda group, worker, pushed: group.kill(worker)
    )
    with pytest.raises(WorkerFailed, match="no worker is left; the last was lost: w0"):
        train_synchronously(group, LoopConfig(batches=job.batches, epochs=1), History())


def test_one_asynchronous_worker_is_never_stale(stored: Stored) -> None:
    job, sent, storage = stored
    group, history = InTurnWorkerGroup(sent, storage, RUN, workers(1.0)), History()
    train_asynchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), history)
    assert {push.staleness for push in history.pushes} == {0}
    assert sum(push.samples for push in history.pushes) == job.epochs * job.samples


def test_staleness_counts_updates_since_the_pull(stored: Stored) -> None:
    """A worker three times as fast: three of its pushes come while the slow one computes."""
    job, sent, storage = stored
    group, history = InTurnWorkerGroup(sent, storage, RUN, workers(3.0, 1.0)), History()
    train_asynchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), history)
    full = [push for push in history.pushes if push.samples == 2]
    slow = [push.staleness for push in full if push.worker == "w1"]
    assert slow
    assert set(slow[:-1]) <= {2, 3}
    assert max(push.staleness for push in full if push.worker == "w0") == 1


@pytest.mark.parametrize("push", [1, 2, 3])
def test_asynchronous_training_applies_each_sample_once(stored: Stored, push: int) -> None:
    job, sent, storage = stored
    done: list[int] = []

    def lose(group: InTurnWorkerGroup, worker: str, pushed: int) -> None:
        if pushed == 3 and not done:
            done.append(pushed)
            group.kill("w1")
        if pushed == 6 and len(done) == 1:
            done.append(pushed)
            group.kill_server()

    group, history = (
        InTurnWorkerGroup(sent, storage, RUN, workers(1.0, 2.0, 1.5, push=push), before_push=lose),
        History(),
    )
    train_asynchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs, save_every=2), history)
    assert done == [3, 6]
    assert sum(record.samples for record in history.pushes) == job.epochs * job.samples
    assert group.server.samples == job.epochs * job.samples
    assert group.server.version == len(history.pushes)
    assert not group.server.applied.beyond


def test_a_finished_run_that_is_begun_again_does_nothing(stored: Stored) -> None:
    job, sent, storage = stored
    config = LoopConfig(batches=job.batches, epochs=job.epochs, save_every=1)
    first = InTurnWorkerGroup(sent, storage, RUN, workers(1.0))
    train_synchronously(first, config, History())
    again, history = InTurnWorkerGroup(sent, storage, RUN, workers(1.0, 1.0)), History()
    train_synchronously(again, replace(config, epochs=job.epochs), history)
    assert history.losses == []
    for name, tensor in first.server.state_dict().items():
        assert torch.equal(again.server.state_dict()[name], tensor)


def resumed(stored: Stored, **settings: Any) -> tuple[InTurnWorkerGroup, LoopConfig]:
    """A group whose server is at the end of the first of two epochs, and the config of both."""
    job, sent, storage = stored
    first = InTurnWorkerGroup(sent, storage, RUN, workers(1.0))
    config = LoopConfig(batches=job.batches, epochs=job.epochs, save_every=2)
    train_synchronously(first, replace(config, epochs=1), History())
    first.save()
    return InTurnWorkerGroup(sent, storage, RUN, workers(1.0, 1.0), **settings), config


def test_a_run_that_goes_on_and_loses_its_server_counts_each_step_once(stored: Stored) -> None:
    done: list[int] = []

    def lose(group: InTurnWorkerGroup, worker: str, pushed: int) -> None:
        if pushed == 5 and not done:
            done.append(pushed)
            group.kill_server()

    (group, config), history = resumed(stored, before_push=lose), History()
    train_synchronously(group, config, history)
    assert history.server_restarts == 1
    assert len(history.losses) == len(history.computed_by) == config.steps // 2


def test_an_asynchronous_run_that_goes_on_tells_the_watch_what_was_done_before(stored: Stored) -> None:
    told: list[float] = []
    group, config = resumed(stored)
    train_asynchronously(group, replace(config, watch=lambda _, done: told.append(done)), History())
    assert 0.5 < told[0] < told[-1] == 1.0


SPEEDS = st.lists(st.floats(0.25, 8.0), min_size=1, max_size=4)


@given(items=st.integers(0, 7), speeds=SPEEDS)
def test_no_other_division_ends_earlier(items: int, speeds: list[float]) -> None:
    counts = counts_by_speed(items, speeds)
    assert sum(counts) == items
    ends = [max(n / s for n, s in zip(other, speeds, strict=True)) for other in _divisions(items, len(speeds))]
    assert max(n / s for n, s in zip(counts, speeds, strict=True)) <= min(ends) * (1 + 1e-9)


@given(items=st.integers(0, 40), speeds=SPEEDS)
def test_shares_are_runs_of_neighbours_in_order(items: int, speeds: list[float]) -> None:
    parts = deal(range(items), speeds)
    assert len(parts) == len(speeds)
    assert list(itertools.chain(*parts)) == list(range(items))


def test_shares_follow_speeds() -> None:
    assert counts_by_speed(8, [3.0, 1.0]) == (6, 2)
    assert counts_by_speed(2, [10.0, 1.0]) == (2, 0)


def _divisions(items: int, workers: int) -> list[tuple[int, ...]]:
    return [c for c in itertools.product(range(items + 1), repeat=workers) if sum(c) == items]
