"""Functions load while they compute, and nobody's random numbers change: the bits of one process, however they load."""

import copy
import functools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from funcpipe.client.prepare.job import Job
from funcpipe.core import Events, Plan, Resource, ScheduleKind
from funcpipe.runstate.documents import get_document
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.data_source import DatasetFactory, LoaderOptions, data_source
from funcpipe.training.plain import PlainTraining
from funcpipe.training.state import merge_stages
from tests.e2e.plans import even_plan, momentum
from tests.in_process import make_job, prepared_run, run_workers
from tests.support.run_keys import NONCE, signed_for_tests

SAMPLES = 18
PATIENCE_S = 600.0
"""How long a worker waits for a message: processes that load take long to start where others compute."""


class Augmented(Dataset[Any]):
    """Samples that draw from all generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(6).double() + float(np.random.rand()) + random.random()
        return noise + index / SAMPLES, torch.tensor(index % 4)


def jittered(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A collate function that draws too."""
    x, y = torch.utils.data.default_collate(samples)
    return x + torch.rand(()).double(), y


def model() -> nn.Module:
    torch.manual_seed(5)
    layers = [nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 4)]
    return nn.Sequential(*layers).double()


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output + torch.rand_like(output), target)


def plan(schedule: ScheduleKind = ScheduleKind.GPIPE, *, recompute: bool = False, stages: int = 3) -> Plan:
    sample = (torch.zeros(2, 6).double(),)
    return even_plan(
        model(),
        sample,
        stages=stages,
        replicas=2,
        micro_batch=2,
        micro_batches=2,
        schedule=schedule,
        recompute=recompute,
    )


def job_by(chosen: Plan, **options: Any) -> Job:
    job = make_job(model(), chosen, Augmented, loss=noisy_loss, optimizer=momentum, epochs=2, deadline_s=PATIENCE_S)
    return replace(job, loading=LoaderOptions(collate=jittered, **options))


def trained(job: Job) -> dict[str, Tensor]:
    """What the first replicas end with; all others have the same bits."""
    workers = run_workers(job, MemoryStorage())
    first, second = (
        merge_stages([workers[f"s{s}.r{r}"].computation.state() for s in range(3)]).state_dict() for r in range(2)
    )
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    return dict(first)


@functools.cache
def trained_plainly() -> dict[str, Tensor]:
    """What the first replicas of a plan of three stages end with, whose batches a thread loads."""
    return trained(job_by(plan()))


def in_one_process(job: Job) -> dict[str, Tensor]:
    steps = [step for epoch in range(job.epochs) for step in job.batches.epoch(epoch)]
    plain = PlainTraining(
        model=model(),
        graph=job.graph,
        dataset=job.dataset(),
        steps=steps,
        recipe=job.recipe,
        seed=job.seed,
        collate=job.loading.collate,
    )
    return dict(plain.run().end)


@pytest.mark.parametrize("schedule", ScheduleKind)
def test_samples_dropout_and_loss_draw_what_one_process_draws(schedule: ScheduleKind) -> None:
    job = job_by(plan(schedule))
    found, expected = trained(job), in_one_process(copy.copy(job))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9)


def test_a_stage_that_recomputes_reads_the_same_batch_again() -> None:
    once, again = trained_plainly(), trained(job_by(plan(recompute=True)))
    assert once.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in once.items())


def test_processes_that_load_change_no_bit() -> None:
    thread, processes = trained_plainly(), trained(job_by(plan(), workers=2, prefetch_factor=2))
    assert thread.keys() == processes.keys()
    assert all(torch.equal(tensor, processes[name]) for name, tensor in thread.items())


def test_loads_are_tasks_of_a_lane_in_the_stages_that_read_data() -> None:
    storage = MemoryStorage()
    job = job_by(plan())
    run_workers(job, storage)
    signed, keys = signed_for_tests(storage), Keys("run-1", 0, NONCE)
    loads = {
        f"s{stage}.r{replica}": [
            event.task
            for event in get_document(signed, Events, keys.trace(f"s{stage}.r{replica}", 0)).events
            if event.lane is Resource.LOAD
        ]
        for stage in range(3)
        for replica in range(2)
    }
    assert [worker for worker, tasks in loads.items() if tasks] == ["s0.r0", "s0.r1", "s2.r0", "s2.r1"]
    steps = [step for epoch in range(2) for step in job.batches.epoch(epoch)]
    for worker in ("s0.r1", "s2.r1"):
        assert len(loads[worker]) == sum(len(step.micro_batches[1::2]) for step in steps)
    assert sum(task.endswith(".k1") for task in loads["s0.r0"]) > 0, "the next step's are loaded in the step before"


def test_data_is_uploaded_once_and_not_with_every_stage() -> None:
    draw = torch.Generator().manual_seed(1)
    samples = [(torch.randn(6, generator=draw).double(), torch.tensor(i % 4)) for i in range(SAMPLES)]
    job = make_job(model(), plan(), DatasetFactory(samples), loss=F.cross_entropy, optimizer=momentum, epochs=1)
    storage = MemoryStorage()
    prepared = prepared_run(job, storage)
    sizes = {name: len(bytes(contents)) for name, contents in prepared.data.objects()}
    contents_bytes = SAMPLES * (6 * 8 + 8)
    assert contents_bytes <= sizes["shard-000000"] < contents_bytes + 1000
    assert sizes["dataset.bundle"] < 500
    assert set(sizes) == {"dataset.bundle", "dataset.tensors", "shard-000000"}
    wholly = trained(job)
    pickled = replace(job, dataset=lambda: samples)
    for name, tensor in trained(pickled).items():
        assert torch.equal(tensor, wholly[name])


def test_a_loader_is_taken_over() -> None:
    source = data_source(DataLoader(Augmented(), batch_size=7, collate_fn=jittered))
    assert source.options.collate is jittered
    assert source.shuffle is False
