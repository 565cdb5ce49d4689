"""The causes of failed runs, in words."""

from funcpipe.client.control.verdict import awaited_worker, clock_time, last_awaited, only_wait
from funcpipe.core import Busy, Outcome, WorkerReport
from funcpipe.core.settings import WHY_GONE
from funcpipe.errors import DeadlineExceeded, NotFinite, WorkerFailed
from funcpipe.platforms.base import Cause, Handle, State, Status, Storage
from funcpipe.runstate.checkpoint_index import read_index
from funcpipe.runstate.generations import find_record
from funcpipe.runstate.halt import read_halt
from funcpipe.runstate.heartbeats import newest_heartbeat
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import last_attempt
from funcpipe.runstate.spending import worker_reports
from funcpipe.scheduler.tasks import Task, source_of


def final_failures(storage: Storage, keys: Keys) -> list[WorkerReport]:
    """The reports of failures that have ended a worker for good."""
    return [report for report in _current_failures(storage, keys) if report.is_final]


def first_failure(storage: Storage, keys: Keys, otherwise: str | None = None) -> WorkerFailed:
    """The error of the worker that failed first, or `otherwise` if none has said why.

    Workers that only waited for a message are not to blame: the worker is named whose work is missing.
    """
    report = min(_current_failures(storage, keys), key=_blame, default=None)
    if report is None and otherwise is None:  # or it cannot be read
        halt = read_halt(storage, keys)
        otherwise = None if halt is None else halt.reason
    if report is None or (otherwise is not None and _only_waited(report)):
        return WorkerFailed(f"run {keys.run}: {otherwise or 'failed'}")
    said = f"run {keys.run}: {_explain(storage, keys, report)}"
    if _is_not_finite(report):
        return NotFinite(said)
    return WorkerFailed(said if report.traceback is None else f"{said}\n\n{report.traceback}")


def final_failure(storage: Storage, keys: Keys) -> str | None:
    """The failure that has ended the run, in one line; None if no worker has ended by one."""
    report = min(final_failures(storage, keys), key=_blame, default=None)
    return None if report is None else _explain(storage, keys, report)


def awaited_by(storage: Storage, keys: Keys, waiter: str) -> str:
    """The worker that `waiter` waits for, directly or through others, and its last heartbeat.

    Empty if it waits for none.
    """
    waits = _waits(storage, keys, waiter)
    worker = last_awaited(waiter, waits)
    return "" if worker == waiter else f"worker {_last_seen(storage, keys, worker)}"


def _blame(report: WorkerReport) -> tuple[bool, float]:
    """The rank of a failure: numbers that are not finite first, the last stage's before others, as gradients flow."""
    if _is_not_finite(report):
        return False, -1.0 - Task.parse(report.task).stage if report.task else -1.0
    return _only_waited(report), report.ended_at_s


def _is_not_finite(report: WorkerReport) -> bool:
    return str(report.error).startswith(NotFinite.__name__)


def _only_waited(report: WorkerReport) -> bool:
    return str(report.error).startswith(DeadlineExceeded.__name__)


def _explain(storage: Storage, keys: Keys, report: WorkerReport) -> str:
    """The error of a failed attempt, without its traceback."""
    if _only_waited(report):
        return _missing(storage, keys, report)
    if _is_not_finite(report):
        return _ended_by_numbers(storage, keys, report)
    where = f"in task {report.task}" if report.task else "outside its tasks"
    return f"worker {report.worker} failed {where}: {report.error}"


def _ended_by_numbers(storage: Storage, keys: Keys, report: WorkerReport) -> str:
    """The place of the first numbers that are not finite, the step saved before, and the way out."""
    said = f"{str(report.error).removeprefix(f'{NotFinite.__name__}: ')}, found by worker {report.worker}"
    record = find_record(storage, keys)
    if record is not None:
        index = read_index(storage, keys, first_step=record.first_step)
        saved = index.common_step(len(record.plan.stages), record.plan.replicas)
        said += f"; the newest checkpoint is that after step {saved}" if saved else "; nothing is saved from before"
    return (
        f"{said}. Lower the learning rate, clip the gradient (clip_grad_norm), look at the samples of that step, or "
        "leave such steps out: on_nan='skip' (--on-nan skip)"
    )


def _missing(storage: Storage, keys: Keys, report: WorkerReport) -> str:
    """The worker whose work an attempt has waited for too long."""
    waited = str(report.error).removeprefix(f"{DeadlineExceeded.__name__}: ")
    if report.task is None:
        return f"worker {report.worker} waited too long: {waited}"
    wait = Busy(lane="download", task=report.task, since_s=0.0, awaits=str(source_of(Task.parse(report.task))))
    waits = {report.worker: wait} | _waits(storage, keys, awaited_worker(wait))
    missing = last_awaited(report.worker, waits)
    return (
        f"the work of worker {missing} is missing: {waited}; worker {report.worker} waited for it in task "
        f"{report.task}. Worker {_last_seen(storage, keys, missing)}"
    )


def _waits(storage: Storage, keys: Keys, waiter: str) -> dict[str, Busy]:
    """The waits of the workers on which `waiter` depends, by their last heartbeats; those that compute have none."""
    waits: dict[str, Busy] = {}
    while waiter not in waits:
        beat = newest_heartbeat(storage, keys, waiter)
        wait = None if beat is None else only_wait(beat)
        if wait is None:
            break
        waits[waiter] = wait
        waiter = awaited_worker(wait)
    return waits


def _last_seen(storage: Storage, keys: Keys, worker: str) -> str:
    beat = newest_heartbeat(storage, keys, worker)
    if beat is None:
        return f"{worker} never sent a heartbeat"
    doing = ", ".join(f"{busy.task} for {busy.since_s:.1f} s" for busy in beat.busy)
    return (
        f"{worker} sent its last heartbeat at {clock_time(beat.sent_at_s)}, after step {beat.step} of {beat.steps}"
        + (f", doing {doing}" if doing else "")
    )


def _current_failures(storage: Storage, keys: Keys) -> list[WorkerReport]:
    """The reports of the failures of workers' last attempts; those of attempts that have a successor do not count."""
    failed = [report for report in worker_reports(storage, keys) if report.outcome is Outcome.FAILED]
    last = {worker: last_attempt(storage, keys, worker) for worker in {report.worker for report in failed}}

    def counts(report: WorkerReport) -> bool:
        newest = last[report.worker]
        if newest is None or newest.attempt != report.attempt:
            return False
        return newest.ended is Outcome.FAILED or not report.is_final

    return [report for report in failed if counts(report)]


def how_it_ended(
    handle: Handle, status: Status, report: WorkerReport | None, *, leased: bool = True, taken_by: int | None = None
) -> str:
    """The end of a function that did not finish its work, by its `report`.

    It had lost its lease if an attempt of the number `taken_by` has taken it, or if it is not `leased` any more.
    """
    if report is not None and report.error is not None:
        return f"({handle.name}) failed: {report.error}"
    if report is not None and report.outcome is Outcome.HANDED_OVER:
        return f"({handle.name}) has handed over, and its successor has ended or never begun"
    if taken_by is not None:
        return f"({handle.name}) ended without a report, as attempt {taken_by} had taken its lease"
    if status.state is State.DONE and not leased:
        return (
            f"({handle.name}) ended without a report, and its lease is missing: {WHY_GONE}; or your code has called "
            "os._exit(0) while it was loaded"
        )
    if status.state is State.DONE or status.cause is Cause.EXITED:
        how = status.reason or "ended with exit code 0"
        return f"({handle.name}) {how} and without a report, as after os._exit() in your code or a library"
    return f"({handle.name}) ended without a report" + (f": {status.reason}" if status.reason else "")
