"""Workers that die while gradients are summed in 8 bits: what rounding took is saved, and so the bits stay the same."""

import pytest
import torch.nn.functional as F

from funcpipe.core import FaultTolerance, Plan, Streams, Sync, Wire
from funcpipe.training.sharding import RESIDUAL, without_residuals
from funcpipe.worker.loop import Worker
from tests.e2e.plans import momentum
from tests.in_process import Killing, make_job, run_workers
from tests.recording import Recording
from tests.training.test_wire_sync import WAYS, adam, assert_every_worker_has, in_one_process, model, plan_of, vectors

KILLED_IN = 5
"""The step in which a worker dies, the first after the second checkpoint."""


def kills(worker: str) -> Killing:
    """A storage that kills `worker` once it has put its first message of a step."""
    return Killing(f"/messages/{worker}/{KILLED_IN:08d}/put-")


def train(storage: Killing, plan: Plan) -> dict[str, Worker]:
    optimizer = adam if plan.shard_optimizer else momentum
    job = make_job(model(Wire.INT8), plan, vectors, loss=F.cross_entropy, optimizer=optimizer, epochs=2)
    faults = FaultTolerance(checkpoint_steps=2)
    return run_workers(job, storage, platform_url=Recording().url, faults=faults)


@pytest.mark.parametrize(
    ("way", "killed"),
    [
        *((way, "s0.r1") for way in WAYS[1:]),
        (WAYS[2], "s0.r0"),
        *(pytest.param(way, "s0.r0", marks=pytest.mark.long) for way in (WAYS[1], *WAYS[3:])),
    ],
)
def test_a_worker_that_is_killed_goes_on_with_what_rounding_had_taken(
    way: tuple[Sync, Streams | None], killed: str
) -> None:
    """In a repeated step a sum can be read before the contribution to it is rounded again, as in an all-reduce."""
    plan, storage = plan_of(way, 2, Wire.INT8), kills(killed)
    workers = train(storage, plan)
    assert storage.last is None, "nobody was killed"
    assert_every_worker_has(workers, in_one_process(workers, plan))


@pytest.mark.parametrize(
    ("way", "last"),
    [
        (WAYS[5], "merged.s0.r1.k0"),
        (WAYS[6], "split.s0.r1.k0"),
        *(pytest.param(WAYS[5], put, marks=pytest.mark.long) for put in ("split.s0.r1.k1", "merged.s0.r1.k1")),
        *(pytest.param(WAYS[6], put, marks=pytest.mark.long) for put in ("split.s0.r1.k2", "merged.s0.r0.k1")),
    ],
)
def test_so_does_one_that_adds_for_its_group(way: tuple[Sync, Streams | None], last: str) -> None:
    """Of four replicas, in two groups or in a tree with two levels; what the sum of a group has lost is added once,
    however often it is made.
    """
    plan, storage = plan_of(way, 4, Wire.INT8), Killing(f"/00000003/put-{last}$")
    workers = train(storage, plan)
    assert storage.last is None, "nobody was killed"
    assert_every_worker_has(workers, in_one_process(workers, plan))


@pytest.mark.parametrize("killed", ["s0.r1", pytest.param("s1.r0", marks=pytest.mark.long)])
def test_so_does_one_with_a_divided_optimiser(killed: str) -> None:
    plan, storage = plan_of(WAYS[4], 2, Wire.INT8, shard_optimizer=True), kills(killed)
    workers = train(storage, plan)
    assert storage.last is None, "nobody was killed"
    assert_every_worker_has(workers, in_one_process(workers, plan, adam))


def test_a_resumed_run_begins_without() -> None:
    workers = train(kills("s0.r1"), plan_of(WAYS[1], 2, Wire.INT8))
    state = workers["s0.r1"].computation.state()
    kept = {name: tensor for name, tensor in state.tensors.items() if name.startswith(RESIDUAL)}
    assert set(kept) == {"residual/1/sent", "residual/1/summed"}
    assert all(tensor.any() for tensor in kept.values())
    computation = workers["s0.r1"].computation
    computation.restore(without_residuals(state))
    feedback = computation.feedback()
    assert feedback is not None
    assert not feedback.sent.any()
    assert not feedback.summed.any()
