"""What a client asks for that follows many workers, and what it learns from that."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.client.follow import steps
from funcpipe.client.follow.functions import HeartbeatWatch, WatchedWorker
from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import Progress
from funcpipe.client.follow.supervisor import POLLED_AT_ONCE, Supervisor
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import (
    FaultTolerance,
    LeaseDocument,
    Outcome,
    RequestCounts,
    RunAccount,
    RunSettings,
    StepReport,
    WorkerSpec,
)
from funcpipe.platforms.base import Handle, RequestMeter, State, Status
from funcpipe.platforms.function_group import StartedFunction
from funcpipe.platforms.wrappers import Counted
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.functions import MANY, OUT_OF_REACH_S, record_together
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.liveness import (
    READ_AT_ONCE,
    RunLiveness,
    WorkerState,
    find_liveness,
    worker_names,
)
from funcpipe.runstate.owner import owned
from funcpipe.runstate.reports import LOSSES_READ, StepReader
from funcpipe.runstate.snapshot import Snapshot
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.client.scripted import KEYS as SIGNED
from tests.client.scripted import Run as ScriptedRun
from tests.client.scripted import Scripted, spec_with
from tests.client.threads import RUN, job, smaller_job
from tests.run_documents import BEAT, PLAN, RECORD

KEYS, FAULTS = Keys("run-1"), FaultTolerance(heartbeat_s=10.0, lease_s=30.0, start_s=60.0)
SILENT_AFTER = int((FAULTS.lease_s + 2 * FAULTS.heartbeat_s) // FAULTS.heartbeat_s)
"""After so many heartbeats that did not come a function may still be alive."""


def spec_of(replica: int, *, replicas: int) -> WorkerSpec:
    return WorkerSpec(
        run="run-1",
        attempt=0,
        stage=0,
        replica=replica,
        plan=replace(PLAN, replicas=replicas, global_batch=PLAN.micro_batch * replicas),
        storage="memory://",
        platform="scripted://here",
        bundle="b",
        bundle_sha256="x",
        parameters="p",
        epochs=1,
        seed=0,
        message_deadline_s=300.0,
        faults=FAULTS,
    )


@dataclass
class Watched:
    """So many workers that are watched by a clock which a test sets, and the requests that this takes."""

    count: int
    now_s: float = 1000.0
    objects: MemoryStorage = field(default_factory=MemoryStorage)
    meter: RequestMeter = field(default_factory=RequestMeter)
    beats: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        specs = [spec_of(replica, replicas=self.count) for replica in range(self.count)]
        self.workers = {spec.worker: WatchedWorker(spec, beat_seen_s=self.now_s) for spec in specs}
        storage = Counted(self.objects, self.meter)
        self.watch = HeartbeatWatch(storage, KEYS, self.workers, clock=lambda: self.now_s)

    def beat(self, workers: Sequence[int]) -> None:
        for replica in workers:
            beat = replace(BEAT, worker=f"s0.r{replica}", beat=next(self.beats), requests=RequestCounts(gets=replica))
            put_document(self.objects, KEYS.heartbeat(beat.worker, 0), beat)

    def silent(self) -> set[int]:
        """The workers that are silent by a listing that is due now."""
        listed_s = self.watch.list_due()
        assert listed_s is not None
        return {worker.spec.replica for worker in self.workers.values() if worker.is_silent(0, listed_s)}


@pytest.mark.parametrize("count", [1, READ_AT_ONCE, 999, 1000, 1001, 2500])
def test_a_listing_for_each_thousand_workers_says_who_is_alive(count: int) -> None:
    watched = Watched(count)
    watched.beat(range(count))
    assert watched.silent() == set()
    asked = watched.meter.counts
    assert (asked.lists, asked.gets, asked.puts) == (math.ceil(count / 1000), min(count, READ_AT_ONCE), 0)
    assert watched.watch.list_due() is None  # it is not due again
    assert watched.meter.counts == asked


@given(rounds=st.lists(st.sets(st.integers(0, 4)), max_size=14))
def test_a_worker_is_silent_when_its_own_heartbeat_did_not_change_for_long(rounds: list[set[int]]) -> None:
    watched = Watched(5)
    watched.beat(range(5))
    assert watched.silent() == set()
    missed = [0] * 5
    for beating in rounds:
        watched.now_s += FAULTS.heartbeat_s
        watched.beat(sorted(beating))
        missed = [0 if replica in beating else missed[replica] + 1 for replica in range(5)]
        assert watched.silent() == {replica for replica in range(5) if missed[replica] > SILENT_AFTER}


def test_heartbeats_of_many_workers_are_read_in_turn() -> None:
    watched, count = Watched(50), 50
    for listing in range(1, 5):
        watched.beat(range(count))
        watched.silent()
        watched.now_s += FAULTS.heartbeat_s
        read = [worker for worker in watched.workers.values() if worker.requests]
        assert len(read) == min(listing * READ_AT_ONCE, count)
    assert all(worker.requests[0].total.gets == worker.spec.replica for worker in watched.workers.values())


def test_a_heartbeat_that_stays_is_not_read_again() -> None:
    watched = Watched(3)
    watched.beat(range(3))
    for _ in range(3):
        watched.silent()
        watched.now_s += FAULTS.heartbeat_s
    assert watched.meter.counts.gets == 3


def test_a_storage_that_takes_long_to_list_proves_nobody_silent() -> None:
    watched = Watched(2)
    watched.now_s += 10 * FAULTS.start_s

    class Slow(MemoryStorage):
        def etags(self, prefix: str) -> Mapping[str, str]:
            watched.now_s += OUT_OF_REACH_S + 1
            return super().etags(prefix)

    watched.watch = HeartbeatWatch(Slow(), KEYS, watched.workers, clock=lambda: watched.now_s)
    assert watched.silent() == set()


class Asked(Scripted):
    """Notes which functions it is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def status(self, handle: Handle) -> Status:
        self.asked.append(handle.worker)
        return super().status(handle)


def test_the_platform_is_asked_about_some_functions_in_each_poll_and_about_all_in_turn() -> None:
    platform, count = Asked(), 2 * POLLED_AT_ONCE + 3
    supervisor = Supervisor(platform, MemoryStorage(), KEYS, prices=spec_with(), account=RunAccount())
    for replica in range(count):
        supervisor.start(spec_of(replica, replicas=count))
    asked = []
    for _ in range(6):
        assert supervisor.poll() == count
        asked.append(platform.asked)
        platform.asked = []
    assert [len(workers) for workers in asked] == [POLLED_AT_ONCE, POLLED_AT_ONCE, 3] * 2
    assert len(set(itertools.chain.from_iterable(asked[:3]))) == count


@contextmanager
def awaiting(replicas: int) -> Iterator[tuple[list[StepReport], RequestMeter]]:
    """The reports of a step that all of so many replicas have ended, as a client finds them without waiting."""
    run = ScriptedRun(faults=FaultTolerance())
    with run.start() as supervisor, owned(run.storage, SIGNED.run) as owner:
        ready = prepare(job(), session_on(Site(run.platform, run.storage, "memory://")))
        plan = replace(ready.job.plan, replicas=replicas, global_batch=8 * replicas)
        for replica in range(replicas):
            report = StepReport(step=0, samples=4, loss_sum=float(replica))
            put_document(run.storage, SIGNED.step_report(0, f"s2.r{replica}"), report)
        meter = RequestMeter()
        reader = StepReader(Counted(run.storage, meter), SIGNED)
        many = replace(ready, job=replace(ready.job, plan=plan))
        reports, _ = steps.await_step(many, reader, supervisor, 0, owner, steps.StepPolls(10.0))
        yield reports, meter


@pytest.mark.usefixtures("traced")
def test_losses_of_many_replicas_take_no_more_requests_than_those_of_a_few() -> None:
    for replicas in (LOSSES_READ, 4 * LOSSES_READ):
        with awaiting(replicas) as (reports, meter):
            assert len(reports) == meter.counts.gets == LOSSES_READ
            assert meter.counts.lists == 0


@pytest.mark.usefixtures("traced")
def test_the_losses_of_a_result_are_those_of_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[tuple[float, ...], list[float]]:
        seen: list[Progress] = []
        storage = MemoryStorage()
        site = Site(platform := ThreadPlatform(spec_with(), storage), storage, "memory://")
        session = session_on(site, reopen=platform.open)
        result = launch(prepare(smaller_job(), session, settings=RunSettings(name=RUN)), seen.append)
        return result.losses, [progress.loss for progress in seen]

    of_all, shown = trained()
    monkeypatch.setattr(steps, "LOSSES_READ", 1)
    of_one, shown_of_one = trained()
    assert of_one == of_all == tuple(shown)
    assert shown_of_one != shown


@dataclass
class Seen:
    """A run of two stages and so many replicas, of which each worker has a function and has sent a heartbeat."""

    replicas: int
    objects: MemoryStorage = field(default_factory=MemoryStorage)
    platform: Scripted = field(default_factory=Scripted)

    def __post_init__(self) -> None:
        plan = replace(PLAN, replicas=self.replicas, global_batch=PLAN.micro_batch * self.replicas)
        self.record = replace(RECORD, plan=plan)
        together = []
        for worker in worker_names(self.record):
            handle = Handle(worker=worker, name=f"{worker}-0")
            started = StartedFunction(
                worker=worker, attempt=0, handle=handle, usd_s=1e-5, started_at_s=900.0, token="aa"
            )
            together.append(started)
            put_document(self.objects, KEYS.function(worker, 0, "aa"), started)
            put_document(self.objects, KEYS.lease(worker, 0), LeaseDocument(holder=worker))
            put_document(self.objects, KEYS.heartbeat(worker, 0), replace(BEAT, worker=worker))
        record_together(self.objects, KEYS, together)

    def look(
        self, *, asks: bool = True, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[RunLiveness, RequestMeter]:
        meter = RequestMeter()
        snapshot = Snapshot(Counted(self.objects, meter))

        def pause(_: float) -> None:
            meanwhile()
            snapshot.renew()

        opened = (lambda _: self.platform) if asks else None
        return find_liveness(snapshot, self.record, opened, clock=lambda: 1005.0, pause=pause), meter


@pytest.mark.parametrize("replicas", [2, 40])
def test_the_liveness_of_many_workers_is_a_few_listings_and_a_read_of_each(replicas: int) -> None:
    workers, handles = 2 * replicas, 2 * replicas if 2 * replicas <= MANY else 1
    life, meter = Seen(replicas).look()
    assert [worker.state for worker in life.workers] == [WorkerState.WORKING] * workers
    assert meter.counts.lists == 4  # functions, heartbeats, leases, reports
    assert meter.counts.gets == workers + handles + 1  # and the payload of one


def test_of_many_workers_those_that_have_ended_and_those_that_died_are_told_apart() -> None:
    run = Seen(20)
    put_document(run.objects, KEYS.lease("s1.r3", 1), LeaseDocument(holder="it", ended=Outcome.FINISHED))
    run.platform.ended["s0.r7-0"] = Status(state=State.FAILED, reason="killed by SIGKILL")
    life, _ = run.look()
    others = {worker.worker: worker.state for worker in life.workers if worker.state is not WorkerState.WORKING}
    assert others == {"s1.r3": WorkerState.FINISHED, "s0.r7": WorkerState.DEAD}


def test_without_the_platform_a_worker_is_alive_whose_heartbeat_changes_and_no_other() -> None:
    run = Seen(20)
    beats = itertools.count(2)

    def beat() -> None:
        for worker in ("s0.r4", "s1.r9"):
            put_document(run.objects, KEYS.heartbeat(worker, 0), replace(BEAT, worker=worker, beat=next(beats)))

    life, meter = run.look(asks=False, meanwhile=beat)
    assert [worker.worker for worker in life.workers if worker.at_work] == ["s0.r4", "s1.r9"]
    assert meter.counts.gets == 2 * 20 + 1 + 1 + 2  # nobody is read again whose heartbeat stays
