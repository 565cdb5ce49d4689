"""The report that an attempt of a worker leaves when it ends."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace

from funcpipe.core import CountsByKind, Halt, Outcome, RequestCounts, WorkerReport, WorkerSpec
from funcpipe.errors import CorruptMessage, StorageError, TaskFailed
from funcpipe.platforms.base import Invoked, Storage
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.halt import ORDERING, halt_run
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import CLOSING, Lease
from funcpipe.runstate.replica_marks import instruction_set
from funcpipe.worker.time_account import TimeAccount
from funcpipe.worker.tracebacks import describe, user_traceback

_NO_MEMORY = ("not enough memory", "can't allocate memory", "Cannot allocate memory")


class ExitReporter:
    """Made when the attempt begins; its report says how long it ran since it was `invoked`, and what it used."""

    def __init__(
        self,
        spec: WorkerSpec,
        storage: Storage,
        lease: Lease,
        invoked: Invoked,
        clock: Callable[[], float] = time.time,
        account: TimeAccount | None = None,
    ) -> None:
        self._spec = spec
        self._storage = storage
        self._lease = lease
        self._keys = Keys.of(spec)
        self._clock = clock
        self._invoked = invoked
        self._account = account or TimeAccount(invoked, clock)
        self._started_at_s = clock()

    def report(self, outcome: Outcome, failure: BaseException | None) -> None:
        """Write the report; raises Superseded, and writes none, if the worker is another function by now.

        An end that no other attempt would change closes the worker's leases: only then does the report count. A failure
        of that kind ends the whole run.
        """
        if not self._lease.taken:
            self._lease.take()
        elif outcome is not Outcome.HANDED_OVER:
            self._lease.check_now()
        report = self._report(outcome, failure)
        put_document(self._storage, self._keys.worker_report(report.worker, report.attempt), report)
        if not report.is_final:
            return
        self._lease.close(outcome)
        if outcome is Outcome.FAILED:
            order = self._lease.signed(Halt(reason=f"worker {report.worker} failed: {report.error}"))
            halt_run(self._storage, self._keys, order)

    def _report(self, outcome: Outcome, failure: BaseException | None) -> WorkerReport:
        cause = failure.__cause__ if isinstance(failure, TaskFailed) and failure.__cause__ is not None else failure
        alive_s = self._invoked.billed_s
        report = WorkerReport(
            worker=self._spec.worker,
            attempt=self._spec.attempt,
            outcome=outcome,
            started_at_s=self._started_at_s,
            ended_at_s=self._clock(),
            alive_s=alive_s,
            uses=self._account.uses(alive_s),
            first_step=self._account.first_step,
            usd_s=self._spec.account.usd_s,
            instructions=instruction_set(),
            puts=0,
            gets=0,
            empty_gets=0,
            sent_bytes=0,
            received_bytes=0,
            peak_memory_bytes=self._invoked.memory.peak_bytes(),
            task=failure.task if isinstance(failure, TaskFailed) else None,
            error=None if cause is None else describe(cause),
            traceback=None if cause is None else user_traceback(cause),
            retryable=isinstance(cause, StorageError | CorruptMessage),
            out_of_memory=isinstance(cause, MemoryError) or any(text in str(cause) for text in _NO_MEMORY),
        )
        still = RequestCounts(puts=1)  # this report, and what comes after it
        if report.is_final:
            still += CLOSING
        if report.is_final and outcome is Outcome.FAILED:
            still += ORDERING
        counts = self._invoked.meter.by_kind + CountsByKind(default=still)
        return replace(report, **asdict(counts.total), by_kind=counts)
