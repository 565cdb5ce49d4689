"""Why a run failed, in words."""

from funcpipe.core import Outcome, WorkerReport
from funcpipe.errors import DeadlineExceeded, WorkerFailed
from funcpipe.platforms.base import Handle, Status, Storage
from funcpipe.runstate.documents import get_listed_document
from funcpipe.runstate.keys import Keys


def worker_reports(storage: Storage, keys: Keys) -> tuple[WorkerReport, ...]:
    """The reports of all functions that could make one before they ended."""
    found = storage.list(keys.worker_reports)
    return tuple(get_listed_document(storage, WorkerReport, key) for key in found)


def final_failures(storage: Storage, keys: Keys) -> list[WorkerReport]:
    """The reports of failures that a restart would not mend."""
    reports = worker_reports(storage, keys)
    return [report for report in reports if report.outcome is Outcome.FAILED and not report.retryable]


def first_failure(storage: Storage, keys: Keys, otherwise: str = "failed") -> WorkerFailed:
    """The error of the worker that failed first, or `otherwise` if none has said why.

    Workers that only waited for a message that did not come are the last to be blamed.
    """

    def rank(report: WorkerReport) -> tuple[bool, float]:
        return str(report.error).startswith(DeadlineExceeded.__name__), report.ended_at_s

    failed = (report for report in worker_reports(storage, keys) if report.outcome is Outcome.FAILED)
    report = min(failed, key=rank, default=None)
    if report is None:
        return WorkerFailed(f"run {keys.run}: {otherwise}")
    where = f"in task {report.task}" if report.task else "outside its tasks"
    return WorkerFailed(f"run {keys.run}: worker {report.worker} failed {where}: {report.error}\n\n{report.traceback}")


def how_it_ended(handle: Handle, status: Status, report: WorkerReport | None) -> str:
    """How a function ended that did not finish its work."""
    if report is not None and report.error is not None:
        return f"({handle.name}) failed: {report.error}"
    return f"({handle.name}) ended without a report" + (f": {status.reason}" if status.reason else "")
