"""Replicas whose functions compute with other roundings hold the same bits at every checkpoint, or are told apart."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from funcpipe.client.follow.launch import upload
from funcpipe.core import FaultTolerance, OnDrift, Outcome, ReplicaMark, Sync, Wire, WorkerSpec
from funcpipe.errors import ReplicasDiffer
from funcpipe.platforms.catalog import open_platform
from funcpipe.runstate.documents import get_document, put_document
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.replica_marks import compare, digest_of, last_differences
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.computation import Computation
from funcpipe.worker.loop import Worker
from funcpipe.worker.setup import load_worker
from tests.e2e import small
from tests.in_process import Killed, Killing, make_job, prepared_run
from tests.recording import Recording
from tests.support.run_keys import NONCE, signed_for_tests

KEYS = Keys("run-1", 0, NONCE)
FAULTS = FaultTolerance(checkpoint_steps=4)


def rounds_otherwise(computation: Computation) -> None:
    """Let its gradients be what another processor might compute."""
    inner = computation.passes.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        inner(*args, **kwargs)
        for parameter in computation.parameters:
            if parameter.grad is not None:
                parameter.grad.add_(1e-7)

    computation.passes.backward = backward  # type: ignore[method-assign]


def updates_otherwise(computation: Computation) -> None:
    """Let its parameters be what the optimiser makes of them on another processor."""
    inner = computation.update

    def update() -> None:
        inner()
        with torch.no_grad():
            for parameter in computation.parameters:
                parameter.mul_(1 + 1e-6)

    computation.update = update  # type: ignore[method-assign]


def train(
    storage: Killing,
    unlike: Callable[[Computation], None] | None = None,
    *,
    unlike_from: int = 1,
    faults: FaultTolerance = FAULTS,
    sync: Sync = Sync.PIPELINED,
    wire_sync: Wire = Wire.FP32,
    **options: Any,
) -> dict[str, Worker]:
    """Train two stages of two replicas; who is killed gets another attempt. s0.r1 is `unlike` from an attempt on."""
    torch.manual_seed(0)
    plan = small.plan(stages=2, replicas=2, sync=sync, wire_sync=wire_sync)
    optimizer = functools.partial(torch.optim.Adam, lr=0.01)
    job = make_job(small.model(), plan, small.data, loss=nn.functional.cross_entropy, optimizer=optimizer, **options)
    specs = list(upload(prepared_run(job, storage, platform_url=Recording().url, faults=faults), KEYS))

    made: list[Worker] = []

    def run(spec: WorkerSpec) -> Worker:
        worker = load_worker(spec, signed_for_tests(storage), open_platform)
        made.append(worker)
        if unlike is not None and spec.worker == "s0.r1" and spec.attempt >= unlike_from:
            unlike(worker.computation)
        try:
            assert worker.run() is Outcome.FINISHED
        except Exception as error:
            if not isinstance(error.__cause__, Killed):
                for other in made:
                    other.runner.cancel.set()
                raise
            return run(dataclasses.replace(spec, attempt=1))
        return worker

    with ThreadPoolExecutor(len(specs)) as pool:
        started = {spec.worker: pool.submit(run, spec) for spec in specs}
        if (error := started["s0.r1"].exception()) is not None:
            raise error  # the others only waited for it
        return {worker: future.result() for worker, future in started.items()}


def marks(storage: Killing, worker: str) -> dict[str, str]:
    own = signed_for_tests(storage)
    keys = [key for key in own.list(KEYS.progress(worker)) if own.get(key)]
    return {key[-8:]: get_document(own, ReplicaMark, key).digest for key in keys}


def cases() -> Iterator[Any]:
    """Each synchronisation with each wire and with and without clipping, in pairs; all three together take long."""
    last = {Sync.PIPELINED: "merged", Sync.THREE_PHASE: "split", Sync.STREAMED: "merged", Sync.EXCHANGE: "split"}
    for number, (sync, put) in enumerate(last.items()):
        for wire, clipped in itertools.product((Wire.FP32, Wire.BF16), (False, True)):
            in_pairs = clipped == bool((number + (wire is Wire.BF16)) % 2)
            marks = [pytest.mark.long] * (not in_pairs)
            name = f"{sync.value}-put-{put}" + "-clipped" * clipped + f"-{wire.value}"
            yield pytest.param(sync, f"put-{put}", 0.1 if clipped else None, wire, marks=marks, id=name)


@pytest.mark.parametrize(("sync", "last", "clip", "wire_sync"), [*cases()])
def test_a_repeated_step_uses_what_was_written_and_so_replicas_stay_equal(
    sync: Sync, last: str, clip: float | None, wire_sync: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Killing(f"00000006/{last}.s0.r1.k0$")
    workers = train(storage, rounds_otherwise, sync=sync, clip_grad_norm=clip, wire_sync=wire_sync)
    assert storage.last is None
    assert workers["s0.r1"].spec.attempt == 1
    assert workers["s0.r1"].checkpoints.repeated_until == 7
    for stage in range(2):
        one, other = (digest_of(workers[f"s{stage}.r{replica}"].computation.parameters) for replica in range(2))
        assert one == other
        assert marks(storage, f"s{stage}.r0") == marks(storage, f"s{stage}.r1")
    assert "are not those of" not in caplog.text


def test_an_undisturbed_worker_reads_nothing_again() -> None:
    worker = train(Killing())["s0.r1"]
    assert worker.checkpoints.written == frozenset()
    assert worker.checkpoints.repeated_until == 0


def test_a_replica_that_differs_is_told_and_goes_back_to_the_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    storage = Killing()
    with caplog.at_level(logging.INFO, logger="funcpipe"):
        workers = train(storage, updates_otherwise, unlike_from=0, epochs=2)
    instructions = torch.backends.cpu.get_cpu_capability()
    told = {
        f"after step {step} the parameters of s0.r1 (attempt 0, {instructions} instructions) are not those of s0.r0 "
        f"(attempt 0, {instructions} instructions)"
        for step in (4, 8)  # at the next checkpoint, if the other replica had not come so far at the first one
    }
    assert told & set(caplog.messages)
    assert any(message.startswith("goes back to its stage's checkpoint after step") for message in caplog.messages)
    assert marks(storage, "s1.r0") == marks(storage, "s1.r1")
    expected = train(Killing(), epochs=2)
    for name, worker in workers.items():
        pairs = zip(worker.computation.parameters, expected[name].computation.parameters, strict=True)
        assert all(torch.allclose(one, other, atol=1e-4) for one, other in pairs)
    (left,) = last_differences(signed_for_tests(storage), KEYS, stages=2, replicas=2, steps=worker.progress.steps)
    assert (left.stage, left.replica) == (0, 1)


def test_a_replica_that_differs_ends_the_run_if_that_is_wanted() -> None:
    faults = dataclasses.replace(FAULTS, on_drift=OnDrift.FAIL, compare_steps=2)
    with pytest.raises(ReplicasDiffer, match=r"parameters of s0\.r1 .* are not those of s0\.r0"):
        train(Killing(), updates_otherwise, unlike_from=0, faults=faults)


def test_replicas_with_equal_processors_never_differ() -> None:
    storage = Killing()
    worker = train(storage, faults=dataclasses.replace(FAULTS, compare_steps=1))["s0.r1"]
    assert last_differences(signed_for_tests(storage), KEYS, stages=2, replicas=2, steps=worker.progress.steps) == []
    assert len(storage.list(KEYS.progress("s0.r1"))) == 2


def test_a_mark_that_was_cut_short_is_done_without() -> None:
    storage = MemoryStorage()
    mark = ReplicaMark(digest="a", attempt=0, instructions="")
    for worker in ("s0.r0", "s0.r1"):
        put_document(storage, KEYS.done(worker, 0, 0, 8), mark)
    storage.put(KEYS.done("s0.r0", 0, 0, 8), b"{")
    assert last_differences(storage, KEYS, stages=1, replicas=2, steps=8) == []
    assert compare(storage, KEYS, (0, 1), {8: mark}) is None
