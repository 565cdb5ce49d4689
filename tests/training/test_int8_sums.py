"""Gradients summed in 8 bits with error feedback: the bits of one process that rounds and keeps at the same places."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from funcpipe.core import Plan, Precision, ScheduleKind, Streams, Sync, TrainingSpec, Wire
from funcpipe.errors import InvalidValue
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker.loop import Worker
from tests.e2e.int8_sums import Int8Sums
from tests.e2e.networks import Lopsided
from tests.e2e.plans import even_plan, momentum, sample_numbers
from tests.e2e.reference import train
from tests.in_process import make_job, run_workers
from tests.training.test_wire_sync import DIVIDED, SAMPLES, WAYS, adam, assert_every_worker_has, vectors


def model() -> nn.Module:
    torch.manual_seed(2)
    return Lopsided(wide=300, narrow=7)  # of several blocks


def plan_of(way: tuple[Sync, Streams | None], replicas: int, **options: Any) -> Plan:
    sync, cut_as = way
    plan = even_plan(
        *(model(), (torch.zeros(2, 5),)),
        stages=2,
        replicas=replicas,
        micro_batch=2,
        micro_batches=3,
        sync=sync,
        wire_sync=Wire.INT8,
    )
    return replace(plan, streams=cut_as, schedule=ScheduleKind.ONE_F_ONE_B, **options)


def trained(plan: Plan, optimizer: Callable[[Any], optim.Optimizer] = momentum) -> dict[str, Worker]:
    job = make_job(model(), plan, vectors, loss=F.cross_entropy, optimizer=optimizer, epochs=2)
    return run_workers(job, MemoryStorage())


def in_one_process(
    workers: dict[str, Worker],
    plan: Plan,
    optimizer: Callable[[Any], optim.Optimizer] = momentum,
    *,
    feeds_back: bool = True,
) -> dict[str, Tensor]:
    expected = model()
    place = {name: i for i, (name, _) in enumerate(expected.named_parameters())}
    stages = []
    for stage in range(len(plan.stages)):
        held = workers[f"s{stage}.r0"].computation.state().tensors
        stages.append([i for name, i in place.items() if f"model/{name}" in held])
    sums = Int8Sums(stages, [p.numel() for p in expected.parameters()], feeds_back=feeds_back)
    steps = sample_numbers(plan, SAMPLES, epochs=2)
    how: dict[str, Any] = {"loss_fn": F.cross_entropy, "optimizer": optimizer, "steps": steps}
    train(expected, vectors(), **how, replicas=plan.replicas, int8=sums)
    return expected.state_dict()


def summed() -> Iterator[Any]:
    """Every way with two replicas, and with three or four; with all numbers in the long run."""
    for (i, way), replicas in itertools.product(enumerate(WAYS), (2, 3, 4)):
        marks = [] if replicas in (2, 4 - i % 2) else [pytest.mark.long]
        yield pytest.param(way, replicas, marks=marks, id=f"{replicas}-{way[0].value}")


@pytest.mark.parametrize(("way", "replicas"), [*summed()])
def test_every_way_of_summing_has_the_bits_of_one_process(way: tuple[Sync, Streams | None], replicas: int) -> None:
    plan = plan_of(way, replicas)
    workers = trained(plan)
    assert_every_worker_has(workers, in_one_process(workers, plan))


def test_feedback_shows() -> None:
    plan = plan_of(WAYS[1], 2)
    workers = trained(plan)
    with_it, without = (in_one_process(workers, plan, feeds_back=feeds)["last.weight"] for feeds in (True, False))
    assert not torch.equal(with_it, without)


@pytest.mark.parametrize(("way", "replicas"), DIVIDED)
def test_a_divided_optimiser_sums_alike(way: tuple[Sync, Streams | None], replicas: int) -> None:
    plan = plan_of(way, replicas, shard_optimizer=True)
    workers = trained(plan, adam)
    assert_every_worker_has(workers, in_one_process(workers, plan, adam))


def test_losses_must_not_be_scaled() -> None:
    with pytest.raises(InvalidValue, match="wire_sync"):
        plan_of(WAYS[1], 2, precision=Precision.FP16)
    with pytest.raises(InvalidValue, match="wire_back"):
        TrainingSpec(global_batch=8, wire_sync=Wire.INT8, wire_back=Wire.FP16)
