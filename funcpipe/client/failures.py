"""Why a run failed, in words."""

from collections.abc import Iterable

from funcpipe.core import Outcome, WorkerReport
from funcpipe.errors import DeadlineExceeded, WorkerFailed
from funcpipe.platforms.base import Handle, Status


def worst(run: str, reports: Iterable[WorkerReport], otherwise: str) -> WorkerFailed:
    """The error of the worker that failed first; one that only waited in vain comes after all others."""

    def rank(report: WorkerReport) -> tuple[bool, float]:
        return str(report.error).startswith(DeadlineExceeded.__name__), report.ended_at_s

    report = min((r for r in reports if r.outcome is Outcome.FAILED), key=rank, default=None)
    if report is None:
        return WorkerFailed(f"run {run}: {otherwise}")
    where = f"in task {report.task}" if report.task else "outside its tasks"
    return WorkerFailed(f"run {run}: worker {report.worker} failed {where}: {report.error}\n\n{report.traceback}")


def how_it_ended(handle: Handle, status: Status, report: WorkerReport | None) -> str:
    """How a function ended."""
    if report is not None and report.error is not None:
        return f"({handle.name}) failed: {report.error}"
    return f"({handle.name}) {status.reason or 'left'}, without a word"
