"""Runs on functions that are threads: status, stop, clean, memory, money; quick, and without processes."""

import dataclasses
import threading
import time
from collections.abc import Callable

import pytest

from funcpipe.client.control.status import status
from funcpipe.client.control.stopping import clean, stop
from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import (
    FaultTolerance,
    FunctionSize,
    Halt,
    Invocation,
    LeaseDocument,
    OnOutOfMemory,
    Outcome,
    RunLimits,
    RunSettings,
    WorkerSpec,
)
from funcpipe.core.settings import NO_LIMITS
from funcpipe.errors import RunHalted, RunUnknown, WorkerFailed
from funcpipe.platforms.base import Cause, Handle, State, Status
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.generations import newest_record, reserve_generation, write_record
from funcpipe.runstate.halt import halt_run, read_order
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.resume import load_resume_point
from funcpipe.runstate.signing import signed
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.client import scripted
from tests.client.held import HeldPlatform
from tests.run_documents import RECORD
from tests.support import chaos
from tests.support.waiting import LONG_S

QUICK = FaultTolerance(heartbeat_s=0.2, lease_s=60.0, checkpoint_steps=2)


def platform(storage: MemoryStorage) -> ThreadPlatform:
    return ThreadPlatform(load_spec("local"), storage)


def train(
    storage: MemoryStorage,
    functions: ThreadPlatform,
    *,
    limits: RunLimits = NO_LIMITS,
    on_oom: OnOutOfMemory = OnOutOfMemory.FAIL,
    epochs: int = 3,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> RunResult:
    job = dataclasses.replace(chaos.job(), epochs=epochs, prices=functions.spec)
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    faults = dataclasses.replace(QUICK, keep=True, on_oom=on_oom)
    settings = RunSettings(name="run-1")
    return launch(prepare(job, session, faults=faults, limits=limits, settings=settings), on_progress)


def test_a_live_run_says_how_it_fares_stops_after_a_common_step_and_is_cleaned() -> None:
    storage, halted = MemoryStorage(), list[str]()
    functions, came_far = HeldPlatform(load_spec("local"), storage, until=5), threading.Event()

    def see(progress: Progress) -> None:
        if progress.step == 5:
            came_far.set()

    def client() -> None:
        try:
            train(storage, functions, epochs=100_000, on_progress=see)
        except RunHalted as error:
            halted.append(str(error))

    thread = threading.Thread(target=client)
    thread.start()
    assert came_far.wait(LONG_S)
    live = status(storage, "run-1")
    assert [worker.worker for worker in live.workers] == [f"s{s}.r{r}" for s in range(3) for r in range(2)]
    assert all(worker.outcome is None and worker.heard_s is not None and worker.heard_s < 60 for worker in live.workers)
    assert live.run_usd > 0
    assert 0 < live.step < live.steps == 300_000
    functions.go_on()
    ended = stop(storage, "run-1", functions.open)
    thread.join(60)
    assert halted == ["run run-1 was ended: it was stopped"]
    assert {worker.outcome for worker in ended.workers} == {Outcome.HALTED}
    saved = load_resume_point(signed(storage), newest_record(signed(storage), "run-1"))
    assert saved.step > live.step
    assert len(saved.losses) == saved.step
    assert clean(storage, "run-1", functions.open) > 0
    assert storage.list("") == ()
    with pytest.raises(RunUnknown, match="there is no run 'run-1' in this storage"):
        clean(storage, "run-1", functions.open)
    with pytest.raises(RunUnknown):
        status(storage, "run-1")


def test_an_order_to_end_at_once_ends_all_functions() -> None:
    storage = MemoryStorage()
    functions = platform(storage)

    def order(progress: Progress) -> None:
        if progress.step == 3:
            halt_run(signed(storage), Keys.of(newest_record(signed(storage), "run-1")), Halt(reason="enough"))

    with pytest.raises(RunHalted, match="run run-1 was ended: enough"):
        train(storage, functions, epochs=100_000, on_progress=order)


def test_functions_end_before_the_run_costs_too_much_and_nobody_orders_it_twice() -> None:
    storage = MemoryStorage()
    rate_usd_s = 6 * load_spec("local").sizes[0].price_usd_s
    limits = RunLimits(max_usd=2.5 * rate_usd_s)
    with pytest.raises(RunHalted, match=r"it would cost more than \$0\.000"):
        train(storage, platform(storage), epochs=100_000, limits=limits)
    assert max(worker.spent_usd for worker in status(storage, "run-1").workers) * 6 < 1.2 * 2.5 * rate_usd_s


class Small(ThreadPlatform):
    """A platform on which functions that die have run out of memory; notes how large the second stage's are."""

    sizes: list[str]

    def invoke(self, worker: Invocation) -> Handle:
        assert isinstance(worker, WorkerSpec)
        self.sizes.append(worker.plan.stages[1].size)
        return super().invoke(worker)

    def status(self, handle: Handle) -> Status:
        found = super().status(handle)
        if found.state is State.FAILED:
            return dataclasses.replace(found, cause=Cause.OUT_OF_MEMORY, reason="out of memory")
        return found


def small(storage: MemoryStorage) -> Small:
    spec = load_spec("local")
    sizes = tuple(
        FunctionSize(
            name=f"{mb}MB", memory_mb=mb, vcpu=1, upload_bytes_s=1e9, download_bytes_s=1e9, price_usd_s=mb * 1e-8
        )
        for mb in (1024, 2048)
    )
    functions = Small(
        dataclasses.replace(spec, sizes=sizes),
        storage,
        faults_of=lambda number: FunctionFaults(killed_at=60 if number == 2 else None),
    )
    functions.sizes = []
    return functions


def test_a_function_that_runs_out_of_memory_is_reported_with_its_peak() -> None:
    storage = MemoryStorage()
    with pytest.raises(
        WorkerFailed, match=r"worker s1\.r0 ran out of memory: peak \d+ of 1024 MB; --set training\.on-oom=grow"
    ):
        train(storage, small(storage))


def test_a_stage_that_ran_out_of_memory_goes_on_with_larger_functions() -> None:
    storage = MemoryStorage()
    functions = small(storage)
    result = train(storage, functions, on_oom=OnOutOfMemory.GROW)
    assert len(result.losses) == 9
    assert functions.sizes == ["1024MB"] * 6 + ["2048MB"]


def test_two_clients_never_begin_the_same_generation() -> None:
    storage = MemoryStorage()
    assert [reserve_generation(storage, "run-1").generation for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RunUnknown, match="there is no run 'run-1'"):
        newest_record(storage, "run-1")  # none of them has begun


@pytest.mark.parametrize(("step", "step_s", "last"), [(0, 0.0, 1), (3, 0.0, 4), (3, 2.0, 14)])
def test_a_run_is_stopped_as_soon_as_its_workers_can_hear_of_it(step: int, step_s: float, last: int) -> None:
    run = scripted.Run()
    run.start()
    put_document(run.storage, scripted.KEYS.reservation, LeaseDocument(holder="client"))
    write_record(
        run.storage, scripted.KEYS, dataclasses.replace(RECORD, nonce=scripted.KEYS.nonce, platform=run.platform.url)
    )
    run.beat("s0.r0", step=step, step_s=step_s, sent_at_s=time.time())  # not silent: nobody waits for another one
    stop(run.objects, "run-1", run.platform.open, wait_s=0.0)
    order = read_order(run.storage, scripted.KEYS, 0)
    assert order is not None
    assert order.step == last  # two heartbeats of 10 s later, where a worker has said how long its steps are


class StoppedTogether(ThreadPlatform):
    """Each function ends only when all six have been told to."""

    together = threading.Barrier(6, timeout=LONG_S)

    def stop(self, handle: Handle) -> None:
        self.together.wait()
        super().stop(handle)


def test_functions_are_stopped_side_by_side() -> None:
    storage = MemoryStorage()
    functions = StoppedTogether(load_spec("local"), storage)
    train(storage, functions, epochs=1)
    assert not functions.together.broken
