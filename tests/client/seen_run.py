"""A run that seems to be under way: what its functions would have written, on a storage in memory."""

from dataclasses import replace
from typing import Any

from funcpipe.core import Busy, LeaseDocument, Outcome, StepReport, StepSummary, WorkerReport, WorkerSpec
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.functions import start_function
from funcpipe.runstate.generations import reserve_generation, write_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import signed
from funcpipe.testing.memory_storage import MemoryStorage
from tests.recording import Recording
from tests.run_documents import BEAT, PLAN, RECORD, REPORT

NOW_S = 1000.0
COMPUTES = Busy(lane="compute", task="backward.s1.r0.m1", since_s=0.2)
WAITS = Busy(lane="download", task="get-gradient.s0.r0.m1.p1", since_s=0.4, awaits="put-gradient.s1.r0.m1.p0")


class SeenRun:
    """The run `run-1` of two stages, and all that tests let its workers say."""

    def __init__(self, before: "SeenRun | None" = None, *, replicas: int = 1) -> None:
        """A new run, or the one `before` once more, resumed as another generation."""
        self.plan = replace(PLAN, replicas=replicas, global_batch=PLAN.global_batch * replicas)
        self.raw: MemoryStorage = MemoryStorage() if before is None else before.raw
        self.platform = Recording()
        self.storage: Storage = signed(self.raw)
        self.keys: Keys = reserve_generation(self.storage, "run-1")
        self.record = replace(RECORD, plan=self.plan, generation=self.keys.generation, nonce=self.keys.nonce)
        write_record(self.storage, self.keys, self.record)

    def start(self, worker: str, attempt: int = 0, *, before: WorkerReport | None = None) -> None:
        """A function becomes `attempt` of `worker`, after the one before has left a report, or none."""
        stage, replica = (int(number) for number in worker[1:].split(".r"))
        spec = WorkerSpec(
            run="run-1",
            attempt=attempt,
            stage=stage,
            replica=replica,
            plan=self.plan,
            storage="memory://",
            platform=self.platform.url,
            bundle="b",
            bundle_sha256="x",
            parameters="p",
            epochs=1,
            seed=0,
            message_deadline_s=300.0,
        )
        put_document(self.storage, self.keys.payload(worker), spec)
        start_function(self.platform, self.storage, self.keys, spec)
        put_document(self.storage, self.keys.lease(worker, attempt), LeaseDocument(holder=f"{worker}.{attempt}"))
        if before is not None:
            put_document(self.storage, self.keys.worker_report(worker, attempt - 1), before)

    def beat(self, worker: str, number: int, *, attempt: int = 0, **changes: Any) -> None:
        """`worker` sends its heartbeat of that `number`."""
        told: dict[str, Any] = {"sent_at_s": NOW_S, "run_s": 60.0, "run_usd": 0.5, "memory_bytes": 300 << 20, **changes}
        beat = replace(BEAT, worker=worker, attempt=attempt, beat=number, **told)
        put_document(self.storage, self.keys.heartbeat(worker, attempt), beat)

    def report(self, step: int, loss: float, *, skipped: bool = False, worker: str = "s1.r0") -> None:
        """A replica of the last stage reports a step of four samples."""
        report = StepReport(step=step, samples=4, loss_sum=4 * loss, skipped=skipped)
        put_document(self.storage, self.keys.step_report(step, worker), report)

    def summarise(self, losses: list[float]) -> None:
        """The last stage sums up its first steps."""
        reports = [StepReport(step=step, samples=4, loss_sum=4 * loss) for step, loss in enumerate(losses)]
        key = self.keys.step_summary("s1.r0", 0, len(losses))
        put_document(self.storage, key, StepSummary.of(reports))

    def end(self, worker: str, outcome: Outcome) -> None:
        """`worker` ends for good."""
        put_document(self.storage, self.keys.worker_report(worker, 0), left(worker, outcome))
        put_document(self.storage, self.keys.lease(worker, 1), LeaseDocument(holder="", ended=outcome))


def left(worker: str, outcome: Outcome, error: str | None = None) -> WorkerReport:
    """What the first attempt of `worker` leaves."""
    return replace(
        REPORT,
        worker=worker,
        outcome=outcome,
        started_at_s=NOW_S - 40,
        ended_at_s=NOW_S,
        puts=1,
        gets=1,
        peak_memory_bytes=1,
        error=error,
        retryable=error is not None,
    )
