"""A run on a platform whose functions do nothing by themselves: a test says how they end."""

from dataclasses import dataclass, field, replace

from funcpipe.client.follow.launch import upload
from funcpipe.client.follow.supervisor import Supervisor
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import (
    FaultTolerance,
    FunctionSize,
    Invocation,
    OnOutOfMemory,
    Outcome,
    Plan,
    PlatformSpec,
    RunAccount,
    WorkerSpec,
)
from funcpipe.core.logs import RawLine
from funcpipe.errors import PlatformError, PlatformRefused
from funcpipe.platforms.base import Cause, Handle, PlainKeys, Platform, State, Status, Storage
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.generations import write_payload
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease
from funcpipe.testing.memory_storage import MemoryStorage
from tests.run_documents import BEAT, REPORT
from tests.support import chaos
from tests.support.run_keys import NONCE, signed_for_tests

KEYS = Keys("run-1", 0, NONCE)
SIZES_MB = (1024, 2048, 4096)


def spec_with(sizes_mb: tuple[int, ...] = SIZES_MB) -> PlatformSpec:
    """The local platform with sizes that cost 1e-8 dollars a second and megabyte."""
    sizes = tuple(
        FunctionSize(
            name=f"{mb}MB", memory_mb=mb, vcpu=1, upload_bytes_s=1e9, download_bytes_s=1e9, price_usd_s=mb * 1e-8
        )
        for mb in sizes_mb
    )
    return replace(load_spec("local"), sizes=sizes, cold_start_s=0.0)


@dataclass
class Scripted(PlainKeys):
    """A platform of which only the sizes `deployed_mb` can be run, and that fails to start the next `busy` functions.

    `ended` holds the status of functions by name; of those that are `unknown` it cannot say one.
    """

    spec: PlatformSpec = field(default_factory=spec_with)
    url: str = "scripted://here"
    deployed_mb: tuple[int, ...] = SIZES_MB
    invoked: list[WorkerSpec] = field(default_factory=list)
    ended: dict[str, Status] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    busy: int = 0
    unknown: set[str] = field(default_factory=set)

    def check(self, plan: Plan, *, run_s: float | None = None) -> None:
        for stage in plan.stages:
            if stage.memory_mb not in self.deployed_mb:
                raise PlatformRefused(f"there is no function of {stage.memory_mb} MB")

    def invoke(self, worker: Invocation) -> Handle:
        assert isinstance(worker, WorkerSpec)
        if self.busy:
            self.busy -= 1
            raise PlatformError("nobody answers")
        self.invoked.append(worker)
        return Handle(worker=worker.worker, name=f"{worker.worker}-{worker.attempt}")

    def status(self, handle: Handle) -> Status:
        if handle.name in self.unknown:
            raise PlatformError("nobody answers")
        return self.ended.get(handle.name, Status(state=State.RUNNING))

    def stop(self, handle: Handle) -> None:
        self.stopped.add(handle.name)

    def logs(self, run: str) -> tuple[RawLine, ...]:
        return ()

    def detach(self) -> None:
        """Functions run on in any case."""

    def open(self, url: str) -> Platform:
        assert url == self.url
        return self

    def out_of_memory(self, name: str) -> None:
        """Let the function of that name run out of memory."""
        self.ended[name] = Status(state=State.FAILED, cause=Cause.OUT_OF_MEMORY, reason="out of memory")


@dataclass
class Run:
    """A run that was started on a scripted platform: three stages of 1024 MB, two replicas.

    `storage` is `objects` as those see it who have the run's key.
    """

    platform: Scripted = field(default_factory=Scripted)
    objects: MemoryStorage = field(default_factory=MemoryStorage)
    faults: FaultTolerance = field(default_factory=lambda: FaultTolerance(on_oom=OnOutOfMemory.GROW))
    account: RunAccount = field(default_factory=RunAccount)
    prices: PlatformSpec = field(default_factory=spec_with)

    @property
    def storage(self) -> Storage:
        return signed_for_tests(self.objects)

    def supervisor(self, *, keep: bool = True) -> Supervisor:
        return Supervisor(self.platform, self.storage, KEYS, prices=self.prices, account=self.account, keep=keep)

    def start(self, supervisor: Supervisor | None = None) -> Supervisor:
        supervisor = supervisor or self.supervisor()
        site = Site(self.platform, self.objects, "memory://")
        job = replace(chaos.job(), prices=self.prices)
        for spec in upload(prepare(job, session_on(site), faults=self.faults), KEYS):
            write_payload(self.storage, KEYS, spec)
            supervisor.start(spec)
        return supervisor

    def beat(self, worker: str, **changes: float) -> None:
        """Put a heartbeat of the first attempt of `worker`."""
        heartbeat = replace(BEAT, worker=worker, **changes)  # type: ignore[arg-type]
        put_document(self.storage, KEYS.heartbeat(worker, heartbeat.attempt), heartbeat)

    def report(self, worker: str, outcome: Outcome, *, attempt: int = 0, error: str | None = None) -> None:
        report = replace(
            REPORT,
            worker=worker,
            attempt=attempt,
            outcome=outcome,
            puts=2,
            gets=3,
            empty_gets=1,
            sent_bytes=10,
            received_bytes=20,
            peak_memory_bytes=1 << 20,
            error=error,
            alive_s=7.0,
            usd_s=1024e-8,
        )
        put_document(self.storage, KEYS.worker_report(worker, attempt), report)
        lease = Lease(self.storage, KEYS, worker, attempt, fresh_s=1.0)
        lease.take()
        if report.is_final:
            lease.close(outcome)
