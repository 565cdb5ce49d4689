"""Checkpoints of a stage whose optimiser is divided: in parts, and read by any plan."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, optim

from funcpipe.client.follow.launch import upload
from funcpipe.client.prepare.job import Job
from funcpipe.core import FaultTolerance, Plan, RunRecord, Streams, Sync
from funcpipe.errors import CorruptMessage
from funcpipe.platforms.catalog import open_platform
from funcpipe.runstate.checkpoint_index import CheckpointIndex, CheckpointPart, parse_part
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.resume import ResumePoint, load_resume_point
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.sharding import combine_shards, unshard, without_model
from funcpipe.worker.setup import load_worker
from tests.e2e.plans import even_plan
from tests.examples import in_long_run
from tests.in_process import make_job, prepared_run
from tests.support.run_keys import NONCE, signed_for_tests
from tests.training.test_sharding import grouped
from tests.worker.test_buckets import model, vectors

EVERY_STEP = FaultTolerance(checkpoint_steps=1)


def plan_of(replicas: int, stages: int = 2, *, sharded: bool) -> Plan:
    plan = even_plan(
        model(),
        (torch.zeros(3, 5).double(),),
        stages=stages,
        replicas=replicas,
        micro_batch=3,
        micro_batches=6 // replicas,
        sync=Sync.STREAMED,
    )
    return replace(plan, streams=Streams(3, 2, 3), shard_optimizer=sharded)


def job_of(plan: Plan, make: Callable[[Any], optim.Optimizer], epochs: int) -> Job:
    return make_job(model(), plan, vectors, loss=F.cross_entropy, optimizer=make, epochs=epochs)


def run(job: Job, storage: MemoryStorage, resumed: ResumePoint | None = None) -> ResumePoint:
    """Train, and recover what the run has saved last."""
    keys = Keys("run-1", 0 if resumed is None else resumed.keys.generation + 1, NONCE)
    prepared = replace(prepared_run(job, storage, faults=EVERY_STEP), resumed=resumed)
    specs = list(upload(prepared, keys))
    with ThreadPoolExecutor(len(specs)) as pool:
        for worker in [pool.submit(load_worker(spec, signed_for_tests(storage), open_platform).run) for spec in specs]:
            worker.result()
    record = RunRecord(
        run=keys.run,
        generation=keys.generation,
        nonce=keys.nonce,
        plan=job.plan,
        platform="local:///unused",
        storage="file:///unused",
        samples=job.samples,
        epochs=job.epochs,
        steps=job.steps,
        first_step=0 if resumed is None else resumed.step,
        seed=0,
        shuffle=True,
        clip_grad_norm=None,
        losses=() if resumed is None else resumed.losses,
    )
    found = load_resume_point(signed_for_tests(storage), record)
    assert found.step == job.steps
    return found


def tensors(resumed: ResumePoint) -> dict[str, Tensor]:
    assert resumed.state is not None
    return dict(resumed.state.tensors)


MAKERS: list[Callable[[Any], optim.Optimizer]] = [
    partial(optim.Adam, lr=0.02),
    grouped,
    partial(optim.SGD, lr=0.05, momentum=0.9),
    partial(optim.SGD, lr=0.1),
]


@cache
def first_epoch(maker: int, *, sharded: bool) -> tuple[ResumePoint, dict[str, bytes]]:
    """What a run of one epoch has saved last, and all that it leaves in storage."""
    storage = MemoryStorage()
    found = run(job_of(plan_of(3, sharded=sharded), MAKERS[maker], 1), storage)
    return found, {key: storage.get(key) for key in storage.list("")}


def gone_on(maker: int, plan: Plan, *, sharded: bool) -> ResumePoint:
    """What is saved last after one epoch, with its optimiser divided or not, and another one by `plan`."""
    first, objects = first_epoch(maker, sharded=sharded)
    storage = MemoryStorage()
    for key, data in objects.items():
        storage.put(key, data)
    return run(job_of(plan, MAKERS[maker], 2), storage, first)


@cache
def undivided(maker: int) -> ResumePoint:
    """What a run of two epochs whose optimiser is not divided has saved last."""
    return run(job_of(plan_of(3, sharded=False), MAKERS[maker], 2), MemoryStorage())


@pytest.mark.parametrize("maker", [0, 1, *in_long_run([2, 3])], ids=["adam", "groups", "momentum", "sgd"])
def test_parts_of_all_replicas_are_the_checkpoint_of_an_optimiser_that_is_not_divided(maker: int) -> None:
    found, _ = first_epoch(maker, sharded=True)
    expected, _ = first_epoch(maker, sharded=False)
    assert found.state is not None
    assert expected.state is not None
    assert found.state.settings == expected.state.settings
    assert tensors(found).keys() == tensors(expected).keys()
    for name, tensor in tensors(expected).items():
        assert tensors(found)[name].shape == tensor.shape
        assert torch.equal(tensors(found)[name], tensor), name


@pytest.mark.parametrize(
    ("before", "after"), [(True, False), (False, True), (True, True)], ids=["undone", "begun", "kept"]
)
def test_a_run_goes_on_with_or_without_the_division_with_the_same_bits(before: bool, after: bool) -> None:
    found = gone_on(0, plan_of(3, sharded=after), sharded=before)
    expected = undivided(0)
    assert tensors(found).keys() == tensors(expected).keys()
    assert all(torch.equal(tensors(found)[name], tensor) for name, tensor in tensors(expected).items())


@pytest.mark.parametrize(("replicas", "stages"), [(2, 3), (1, 1)])
def test_a_run_goes_on_with_other_replicas_and_cuts(replicas: int, stages: int) -> None:
    """The sums are taken in another order, so the last bits differ."""
    found = gone_on(2, plan_of(replicas, stages, sharded=True), sharded=True)
    expected = undivided(2)
    assert tensors(found).keys() == tensors(expected).keys()
    for name, tensor in tensors(expected).items():
        torch.testing.assert_close(tensors(found)[name], tensor, rtol=1e-8, atol=1e-10)


@cache
def parts() -> tuple[Any, ...]:
    storage = MemoryStorage()
    job = job_of(plan_of(3, 1, sharded=True), MAKERS[0], 1)
    specs = list(upload(prepared_run(job, storage), Keys("run-1", 0, NONCE)))
    workers = [load_worker(spec, signed_for_tests(storage), open_platform) for spec in specs]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda worker: worker.run(), workers))
    return tuple(worker.computation.state() for worker in workers)


def test_a_missing_part_is_found_out_and_no_part_holds_more_than_its_own() -> None:
    first, second, third = parts()
    assert not any(name.startswith("model/") for name in without_model(second).tensors)
    assert len(unshard(combine_shards([first, without_model(second), without_model(third)])).tensors) > 0
    with pytest.raises(CorruptMessage, match="state of only some elements of a parameter"):
        unshard(combine_shards([first, second]))
    broken = {**first.settings["optimizer"], "shards": {"first.weight": [[0]]}}
    with pytest.raises(CorruptMessage, match="does not match its stage"):
        unshard(replace(first, settings={**first.settings, "optimizer": broken}))


def test_a_part_of_another_division_is_refused() -> None:
    first, second, _ = parts()
    storage = MemoryStorage()
    specs = list(
        upload(prepared_run(job_of(plan_of(3, 1, sharded=True), MAKERS[0], 1), storage), Keys("run-1", 0, NONCE))
    )
    computation = load_worker(specs[1], signed_for_tests(storage), open_platform).computation
    computation.restore(combine_shards([second, first]))
    with pytest.raises(CorruptMessage, match="does not match its stage: KeyError"):
        computation.restore(first)


def listing(*saved: tuple[int, str], done: int = 8) -> CheckpointIndex:
    entries = tuple(sorted((step, f"{step:08d}.{name}.json") for step, name in saved))
    return CheckpointIndex(saved={0: entries}, done={(0, replica): done for replica in range(2)}, first_step=0)


def test_names_of_manifests_say_what_they_are_a_part_of() -> None:
    for part in (CheckpointPart(0, 12, model=True), CheckpointPart(11, 12, model=False)):
        assert parse_part(f"00000004.{part}.s0.r3.a00000001.json") == part
    assert parse_part("00000004.s0.r3.a00000001.json") is None
    assert parse_part("00000004.resumed.json") is None


def test_a_stage_is_saved_once_all_parts_are_there_and_a_replica_once_its_own_is() -> None:
    first, second = (4, "0of2m.s0.r0.a0"), (4, "1of2.s0.r1.a0")
    assert listing(first).saved_steps(0) == {0}
    assert listing(second).saved_steps(0) == {0}
    assert listing(first, second).saved_steps(0) == {0, 4}
    assert listing(first).restart_step((0, 0)) == 4
    assert listing(first).restart_step((0, 1)) == 0
    assert listing(second).restart_step((0, 1)) == 0  # nobody has saved the model
    both = listing(first, second)
    assert both.restart_step((0, 1)) == 4
    assert both.manifests_for((0, 1), 4) == ("00000004.1of2.s0.r1.a0.json", "00000004.0of2m.s0.r0.a0.json")
    assert both.manifests_for((0, 0), 4) == ("00000004.0of2m.s0.r0.a0.json",)


def test_who_leaves_saves_what_its_successor_needs_alone() -> None:
    left = listing((4, "0of2m.s0.r0.a0"), (4, "1of2.s0.r1.a0"), (7, "1of2m.s0.r1.a0"))
    assert left.restart_step((0, 1)) == 7
    assert left.manifests_for((0, 1), 7) == ("00000007.1of2m.s0.r1.a0.json",)
    assert left.restart_step((0, 0)) == 4
    assert left.common_step(1, 2) == 4
    assert left.outdated(0, 1, 2) == ()


def test_parts_that_a_later_attempt_wrote_again_count_once_and_go_together() -> None:
    again = listing(
        *((2, f"{part}.a{attempt}") for part in ("0of2m.s0.r0", "1of2.s0.r1") for attempt in (0, 1)),
        *((step, part) for step in (4, 6) for part in ("0of2m.s0.r0.a1", "1of2.s0.r1.a1")),
    )
    assert again.manifests(0, 2) == ("00000002.0of2m.s0.r0.a1.json", "00000002.1of2.s0.r1.a1.json")
    assert [name[:8] for name in again.outdated(0, 1, 2)] == ["00000002"] * 4


def test_a_whole_checkpoint_serves_everyone() -> None:
    assert listing((3, "resumed")).manifests_for((0, 1), 3) == listing((3, "resumed")).manifests(0, 3)
    assert listing((3, "resumed")).restart_step((0, 1)) == 3
