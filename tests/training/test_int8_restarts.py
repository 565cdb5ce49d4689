"""Workers that die while gradients are summed in 8 bits: what rounding took is saved, and so the bits stay the same."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.nn.functional as F

from funcpipe.client.follow.upload import upload
from funcpipe.core import FaultTolerance, Outcome, Plan, Streams, Sync, WorkerSpec
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.catalog import open_platform
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.sharding import RESIDUAL, without_residuals
from funcpipe.worker.loop import Worker
from funcpipe.worker.setup import load_worker
from tests.e2e.plans import momentum
from tests.in_process import make_job, prepared_run
from tests.recording import Recording
from tests.support.run_keys import NONCE, signed_for_tests
from tests.training.test_int8_sums import in_one_process, model, plan_of
from tests.training.test_wire_sync import WAYS, adam, assert_every_worker_has, vectors

KEYS = Keys("run-1", 0, NONCE)
KILLED_IN = 5
"""The step in which a worker dies, the first after the second checkpoint."""


class Killed(Exception):
    """The function is gone."""


class Killing(MemoryStorage):
    """A storage that kills `worker` once it has put its first message of a step."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self.prefix: str | None = KEYS.message(worker, KILLED_IN, "put-")

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        super().put(key, data, if_absent=if_absent, gate=gate)
        if self.prefix is not None and key.startswith(self.prefix):
            self.prefix = None
            raise Killed(key)


def train(storage: Killing, plan: Plan) -> dict[str, Worker]:
    """Train, and restart each worker that is killed."""
    optimizer = adam if plan.shard_optimizer else momentum
    job = make_job(model(), plan, vectors, loss=F.cross_entropy, optimizer=optimizer, epochs=2)
    faults = FaultTolerance(checkpoint_steps=2)
    specs = list(upload(prepared_run(job, storage, platform_url=Recording().url, faults=faults), KEYS))

    def run(spec: WorkerSpec) -> Worker:
        worker = load_worker(spec, signed_for_tests(storage), open_platform)
        try:
            assert worker.run() is Outcome.FINISHED
        except Exception as error:
            if not isinstance(error.__cause__, Killed) or spec.attempt:
                raise
            return run(dataclasses.replace(spec, attempt=1))
        return worker

    with ThreadPoolExecutor(len(specs)) as pool:
        started = {spec.worker: pool.submit(run, spec) for spec in specs}
        return {worker: future.result() for worker, future in started.items()}


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
    plan, storage = plan_of(way, 2), Killing(killed)
    workers = train(storage, plan)
    assert storage.prefix is None, "nobody was killed"
    assert_every_worker_has(workers, in_one_process(workers, plan))


@pytest.mark.parametrize("killed", ["s0.r1", pytest.param("s1.r0", marks=pytest.mark.long)])
def test_so_does_one_with_a_divided_optimiser(killed: str) -> None:
    plan, storage = plan_of(WAYS[4], 2, shard_optimizer=True), Killing(killed)
    workers = train(storage, plan)
    assert storage.prefix is None, "nobody was killed"
    assert_every_worker_has(workers, in_one_process(workers, plan, adam))


def test_a_resumed_run_begins_without() -> None:
    workers = train(Killing("s0.r1"), plan_of(WAYS[1], 2))
    state = workers["s0.r1"].computation.state()
    kept = {name: tensor for name, tensor in state.tensors.items() if name.startswith(RESIDUAL)}
    assert set(kept) == {"residual/1/sent", "residual/1/summed"}
    assert all(tensor.any() for tensor in kept.values())
    computation = workers["s0.r1"].computation
    computation.restore(without_residuals(state))
    assert computation.feedback is not None
    assert not computation.feedback.sent.any()
    assert not computation.feedback.summed.any()
