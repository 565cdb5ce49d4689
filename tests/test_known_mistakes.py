"""Mistakes that systems of this kind have made, each pinned by a test."""

import copy
import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcpipe.client.follow.launch import upload
from funcpipe.client.prepare.job import Job
from funcpipe.comm import codec
from funcpipe.core import FaultTolerance, Plan, Sync
from funcpipe.errors import CorruptMessage, TaskFailed
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.catalog import open_platform
from funcpipe.runstate.keys import Keys, is_message
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.batches import Batches
from funcpipe.worker.loop import Worker
from funcpipe.worker.setup import load_worker
from tests.e2e.plans import even_plan, sample_numbers
from tests.e2e.reference import largest_difference, train
from tests.examples import in_long_run
from tests.in_process import make_job, prepared_run, run_workers
from tests.support.census import below_generation
from tests.support.run_keys import NONCE, signed_for_tests

SAMPLES = 27
optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


class Net(nn.Module):
    """Linear layers, one of which never gets a gradient, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.unused = nn.Linear(2, 2)
        self.second = nn.Linear(5, 5)
        self.third = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) + self.unused(x[:, :2]).detach().mean()
        logits: Tensor = self.third(torch.tanh(self.second(hidden)) + hidden)
        return logits


def dataset() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(3, generator=generator).double(), torch.tensor(i % 2)) for i in range(SAMPLES)]


def prepared(stages: int, replicas: int, *, sync: Sync = Sync.PIPELINED, **options: Any) -> tuple[nn.Module, Plan, Job]:
    torch.manual_seed(7)
    model = Net().double()
    sample = (torch.zeros(2, 3).double(),)
    plan = even_plan(model, sample, stages=stages, replicas=replicas, micro_batch=2, micro_batches=2, sync=sync)
    return model, plan, make_job(model, plan, dataset, loss=F.cross_entropy, optimizer=optimizer, **options)


def expected_state(model: nn.Module, plan: Plan, epochs: int = 1) -> dict[str, Tensor]:
    copied = copy.deepcopy(model)
    steps = sample_numbers(plan, SAMPLES, epochs)
    train(copied, dataset(), loss_fn=F.cross_entropy, optimizer=optimizer, steps=steps)
    return copied.state_dict()


def state_of(workers: dict[str, Worker], replica: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, worker in workers.items():
        if name.endswith(f".r{replica}"):
            found |= worker.computation.state().state_dict()
    return found


@pytest.mark.parametrize("sync", Sync)
@pytest.mark.parametrize("replicas", [4, *in_long_run([2, 3])])
def test_a_worker_s_own_split_is_in_the_sum(sync: Sync, replicas: int) -> None:
    model, plan, job = prepared(1, replicas, sync=sync)
    workers = run_workers(job, MemoryStorage())
    assert largest_difference(state_of(workers, 0), expected_state(model, plan)) < 1e-12


@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_gradients_are_those_of_the_loss_averaged_over_the_global_batch(stages: int, replicas: int) -> None:
    """However the batch is cut, and when the last one is short (27 samples; batches of 4, 8 and 12)."""
    model, plan, job = prepared(stages, replicas, epochs=2)
    found = state_of(run_workers(job, MemoryStorage()), 0)
    assert largest_difference(found, expected_state(model, plan, epochs=2)) < 1e-12


def test_replicas_start_from_the_same_weights_and_stay_bit_identical() -> None:
    _, _, job = prepared(2, 3)
    workers = run_workers(job, MemoryStorage())
    for replica in (1, 2):
        assert largest_difference(state_of(workers, replica), state_of(workers, 0)) == 0


def test_all_workers_draw_the_same_data_for_a_micro_batch() -> None:
    """The inputs that the first stage reads and the targets that the last one reads are of the same samples."""
    drawn: dict[str, list[tuple[int, ...]]] = {}
    _, _, job = prepared(2, 2)
    specs = list(upload(prepared_run(job, MemoryStorage()), Keys("run-1", 0, NONCE)))
    for spec in specs:
        batches = Batches(
            samples=job.samples, global_batch=spec.plan.global_batch, micro_batch=spec.plan.micro_batch, seed=spec.seed
        )
        drawn[spec.worker] = [m for step in batches.epoch(1) for m in step.micro_batches]
    assert len(drawn) == 4
    assert len({tuple(value) for value in drawn.values()}) == 1


def test_no_sample_is_dropped_where_batches_do_not_divide(tmp_path: Path) -> None:
    model, plan, _ = prepared(1, 2)
    assert SAMPLES % plan.global_batch % plan.micro_batch
    log = str(tmp_path / "indices")

    class Watched:
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            with open(log, "a") as file:
                file.write(f"{index}\n")
            return dataset()[index]

    job = make_job(model, plan, Watched, loss=F.cross_entropy, optimizer=optimizer)
    Path(log).write_text("")  # forget what the test's own trace read
    run_workers(job, MemoryStorage())
    assert sorted(map(int, Path(log).read_text().split())) == list(range(SAMPLES))


def test_a_parameter_without_gradient_shifts_nothing_and_is_left_alone() -> None:
    """Weight decay would move a parameter whose gradient is zero rather than none."""
    model, plan, job = prepared(1, 2)
    before = copy.deepcopy(model.state_dict())
    found = state_of(run_workers(job, MemoryStorage()), 0)
    expected = expected_state(model, plan)
    assert largest_difference(found, expected) < 1e-12
    assert torch.equal(expected["unused.weight"], before["unused.weight"])


def test_two_runs_in_one_storage_share_nothing() -> None:
    storage = MemoryStorage()
    _, _, job = prepared(2, 2)
    first = run_workers(job, storage, "run-1")
    kept = {key: storage.get(key) for key in storage.list("run-1/")}
    second = run_workers(job, storage, "run-2")
    assert largest_difference(state_of(first, 0), state_of(second, 0)) == 0
    assert {key: storage.get(key) for key in storage.list("run-1/")} == kept
    assert {key.split("/")[0] for key in storage.list("")} == {"run-1", "run-2"}


class NeverTwice(MemoryStorage):
    """Storage that neither lists nor replaces; but heartbeats, of which only the last one tells anything.

    Each function lists once which functions were started before it, and those of later stages once which have begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self.starts_listed = self.leases_listed = 0

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        super().put(key, data, if_absent="/heartbeats/" not in key, gate=gate)

    def list(self, prefix: str) -> tuple[str, ...]:
        self.starts_listed += "/functions/" in prefix
        self.leases_listed += "/leases/" in prefix
        listed = ("/checkpoints/", "/progress/", "/functions/", "/leases/")
        assert any(part in prefix for part in listed), "a run lists no messages"
        return super().list(prefix)


def test_no_message_is_written_twice_and_nobody_lists_any() -> None:
    storage = NeverTwice()
    _, plan, job = prepared(2, 2, epochs=2)
    run_workers(job, storage)
    assert storage.starts_listed == plan.workers
    assert storage.leases_listed == plan.workers - plan.replicas


def test_messages_do_not_pile_up() -> None:
    storage = MemoryStorage()
    _, _, job = prepared(2, 2, epochs=3)
    run_workers(job, storage, faults=FaultTolerance(checkpoint_steps=1))
    left = {
        int(below_generation(key)[2]) for key in storage.list(Keys("run-1", 0, NONCE).run_prefix) if is_message(key)
    }
    assert left <= {job.steps - 3, job.steps - 2, job.steps - 1}


def test_a_function_gets_its_own_stage_and_nothing_else() -> None:
    model, _, job = prepared(3, 1)
    objects = MemoryStorage()
    storage = signed_for_tests(objects)
    specs = list(upload(prepared_run(job, objects), Keys("run-1", 0, NONCE)))
    held = [set(codec.decode(storage.get(spec.parameters))) for spec in specs]
    assert set().union(*held) == set(model.state_dict())
    assert sum(map(len, held)) == len(set().union(*held))
    biggest = max(p.nbytes for p in model.parameters())
    assert all(len(storage.get(spec.bundle)) < 20_000 + biggest for spec in specs)


def test_a_worker_that_dies_does_not_leave_the_others_waiting_for_ever() -> None:
    def fail_late(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("the loss function fails")

    model, plan, _ = prepared(2, 2)
    job = make_job(model, plan, dataset, loss=fail_late, optimizer=optimizer, deadline_s=1.0)
    with pytest.raises(TaskFailed, match=r"get-gradient\.s0\.r0\.m2\.p1|forward\.s1|get-gradient"):
        run_workers(job, MemoryStorage())


def test_code_is_loaded_only_by_its_digest() -> None:
    objects = MemoryStorage()
    storage = signed_for_tests(objects)
    _, _, job = prepared(1, 1)
    (spec,) = upload(prepared_run(job, objects), Keys("run-1", 0, NONCE))
    assert spec.bundle_sha256 == hashlib.sha256(storage.get(spec.bundle)).hexdigest()
    storage.put(spec.bundle, storage.get(spec.bundle) + b"\0")
    with pytest.raises(CorruptMessage, match="is not the code that the invocation names"):
        load_worker(spec, storage, open_platform)
    with pytest.raises(CorruptMessage):
        load_worker(replace(spec, bundle_sha256="0" * 64), storage, open_platform)
