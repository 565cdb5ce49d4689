"""One attempt of a worker from its invocation to its exit report; a worker whose function dies gets another attempt.

The report holds the traceback of an error as a user sees it: frames of funcpipe and torch are only counted. The
function's log has every frame.

    Traceback (most recent call last):
      … 9 frames of funcpipe and torch
      File "model.py", line 12, in forward
        return self.head(x) / 0
    ZeroDivisionError: division by zero
"""

import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import torch

import funcpipe
from funcpipe.core import CountsByKind, Halt, Outcome, RequestCounts, WorkerReport, WorkerSpec, from_text
from funcpipe.core.logs import in_function
from funcpipe.core.run_key import RunKey
from funcpipe.core.start import StartPart
from funcpipe.core.texts import error_text, shortened
from funcpipe.errors import CorruptMessage, FuncPipeError, RunHalted, StorageError, Superseded, TaskFailed, WorkerFailed
from funcpipe.platforms import process as allocator
from funcpipe.platforms.base import Invoked, OpenPlatform, OpenStorage, Storage
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.halt import ORDERING, halt_run
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import CLOSING, Lease
from funcpipe.runstate.replica_marks import instruction_set
from funcpipe.runstate.signing import OneKey, SignedStorage
from funcpipe.training.device import peak_bytes
from funcpipe.training.stage_job import LoadedStage
from funcpipe.worker.progress import TimeAccount
from funcpipe.worker.setup import lease_of, load_worker, uploaded

_log = logging.getLogger(__name__)


def main(payload: str, *, open_storage: OpenStorage, open_platform: OpenPlatform, invoked: Invoked) -> None:
    """Run the attempt described by `payload`, the JSON of a WorkerSpec. Ends with exit code 1 after a failure."""
    spec = from_text(WorkerSpec, payload, source="the invocation payload")
    if spec.invoked_at_s:
        invoked.start.add(StartPart.ENVIRONMENT, max(time.time() - invoked.billed_s - spec.invoked_at_s, 0.0))
    allocator.configure()
    torch.set_num_threads(1)
    with in_function(run=spec.run, worker=spec.worker, attempt=spec.attempt, levels=spec.log_level):
        storage = open_storage(spec.storage, retry_s=spec.message_deadline_s, meter=invoked.meter, crowd_s=spec.crowd_s)
        ended_well = run_attempt(spec, storage, open_platform, invoked=invoked)
    if not ended_well:
        raise SystemExit(1)


def load(spec: WorkerSpec, open_storage: OpenStorage) -> LoadedStage:
    """Return the stage of `spec`, for functions that are forked from this process."""
    allocator.configure()
    torch.set_num_threads(1)
    storage = open_storage(spec.storage, retry_s=spec.message_deadline_s)
    return LoadedStage.read(spec, SignedStorage(storage, OneKey(RunKey(spec.run_key))), base=uploaded(spec).base)


def run_attempt(
    spec: WorkerSpec,
    storage: Storage,
    open_platform: OpenPlatform,
    *,
    invoked: Invoked,
    clock: Callable[[], float] = time.time,
) -> bool:
    """Run the attempt of `spec` and report how it ended; return True if it ended well.

    The requests of `storage` are counted by the meter of `invoked`. An attempt that is superseded reports nothing, as
    the worker is another function now. `clock` dates the report.
    """
    signed = SignedStorage(storage, OneKey(RunKey(spec.run_key)))
    return Attempt(spec, signed, lease_of(spec, signed), invoked, clock).run(open_platform)


_NO_MEMORY = ("not enough memory", "can't allocate memory", "Cannot allocate memory")


class Attempt:
    """One attempt, made when it begins: its report says how long it ran since it was `invoked`, and what it used."""

    def __init__(
        self, spec: WorkerSpec, storage: Storage, lease: Lease, invoked: Invoked, clock: Callable[[], float]
    ) -> None:
        self._spec = spec
        self._storage = storage
        self._lease = lease
        self._keys = Keys.of(spec)
        self._clock = clock
        self._invoked = invoked
        self._account = TimeAccount(invoked, clock)
        self._started_at_s = clock()

    def run(self, open_platform: OpenPlatform) -> bool:
        """Do the worker's work, and report how it ended; return True if it ended well."""
        try:
            outcome, failure = self._work(open_platform)
            if outcome is not Outcome.HANDED_OVER and not self._lease.taken and self._spec.follows_within_s is not None:
                _log.warning("ends without a report, the attempt before is still this worker")
                return failure is None
            self.report(outcome, failure)
        except Superseded as error:
            _log.warning("ends without a report: %s", error)
            return True
        return failure is None

    def _work(self, open_platform: OpenPlatform) -> tuple[Outcome, BaseException | None]:
        """Return how the work ended, and the error if it failed. Raises Superseded."""
        try:
            self._check_attempts()
            worker = load_worker(
                self._spec,
                self._storage,
                open_platform,
                lease=self._lease,
                invoked=self._invoked,
                account=self._account,
                clock=self._clock,
            )
            outcome = worker.run()
        except Superseded:
            raise
        except RunHalted as error:
            _log.warning("ends at once: %s", error)
            return Outcome.HALTED, None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever ends a function early is reported
            where = "" if isinstance(error, TaskFailed) else "outside its tasks: "  # a failed task names itself
            _log.error("failed: %s%s", where, error, exc_info=error)
            return Outcome.FAILED, error
        _log.info("ends: %s", outcome.value)
        return outcome, None

    def _check_attempts(self) -> None:
        """Raise WorkerFailed after too many: clouds would let functions that start functions go on for ever."""
        most = self._spec.faults.max_attempts
        if self._spec.attempt >= most:
            raise WorkerFailed(
                f"worker {self._spec.worker} has had {most} functions, as many as FaultTolerance.max_attempts allows; "
                "resume the run to go on with as many again"
            )

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
            start=self._invoked.start.times,
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
            out_of_memory=isinstance(cause, MemoryError | torch.OutOfMemoryError)
            or any(text in str(cause) for text in _NO_MEMORY),
            peak_device_bytes=0 if self._spec.device_memory_mb is None else peak_bytes(),
            exhausted_device_mb=self._spec.device_memory_mb if isinstance(cause, torch.OutOfMemoryError) else None,
        )
        still = RequestCounts(puts=1)  # this report, and what comes after it
        if report.is_final:
            still += CLOSING
        if report.is_final and outcome is Outcome.FAILED:
            still += ORDERING
        counts = self._invoked.meter.by_kind + CountsByKind(default=still)
        return replace(report, **asdict(counts.total), by_kind=counts)


_PACKAGES = {"funcpipe": Path(funcpipe.__file__).parent, "torch": Path(torch.__file__).parent}


def describe(error: BaseException) -> str:
    """Return `error` in one line."""
    if isinstance(error, SystemExit):
        code = "" if error.code is None else shortened(repr(error.code))
        return f"SystemExit: your code has called sys.exit({code}), which ends no run; raise an error to do that"
    return error_text(error)


def user_traceback(error: BaseException) -> str | None:
    """Return the traceback of `error` and its causes. Where the user's code had no part in it, it has all frames.

    An error of funcpipe's own says all in its message: it has a traceback only if there is a frame of the user's in it.
    """
    report = traceback.TracebackException.from_exception(error)
    folded = _fold(report)
    return None if isinstance(error, FuncPipeError) and not folded else shortened("".join(report.format()))


class _Folded(traceback.StackSummary):
    """Frames of which those of funcpipe and torch are only counted, but for the last, where the error was raised."""

    def format(self, **options: bool) -> list[str]:
        lines: list[str] = []
        *others, last = self
        for ours, frames in groupby(others, key=lambda frame: bool(_package_of(frame))):
            run = list(frames)
            if ours:
                names = " and ".join(sorted({name for frame in run if (name := _package_of(frame))}))
                lines.append(f"  … {len(run)} frame{'s' * (len(run) > 1)} of {names}\n")
            else:
                lines += traceback.StackSummary.from_list(run).format()
        return lines + traceback.StackSummary.from_list([last]).format()


def _fold(report: traceback.TracebackException) -> bool:
    """Fold the frames of an error, and of those that led to it, that users have frames in; whether there was one."""
    users = any(not _package_of(frame) for frame in report.stack)
    if users:
        report.stack = _Folded(report.stack)
    others = [_fold(other) for other in (report.__cause__, report.__context__) if other is not None]
    return users or any(others)


def _package_of(frame: traceback.FrameSummary) -> str | None:
    """Return the package of a frame, if it is one whose frames say little to a user; generated code is torch's."""
    if frame.filename.startswith("<"):
        return "torch"
    return next((name for name, folder in _PACKAGES.items() if Path(frame.filename).is_relative_to(folder)), None)
