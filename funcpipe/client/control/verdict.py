"""The verdict on a run as a whole, and the causes of failed runs, in words."""

import time
from collections.abc import Mapping, Sequence
from enum import Enum

from funcpipe.core import Busy, Halt, Heartbeat, Outcome, RunRecord, WorkerReport, worker_name
from funcpipe.core.settings import WHY_GONE
from funcpipe.errors import DeadlineExceeded, NotFinite, WorkerFailed
from funcpipe.platforms.base import Cause, Handle, State, Status, Storage
from funcpipe.runstate.checkpoint_index import read_index
from funcpipe.runstate.generations import find_record
from funcpipe.runstate.halt import read_halt
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import last_attempt
from funcpipe.runstate.liveness import RunLiveness, WorkerLiveness, WorkerState, newest_heartbeat
from funcpipe.runstate.reader import worker_reports
from funcpipe.scheduler.tasks import Task, source_of

_LONG_STEPS = 3
_LONG_S = 10.0
"""A worker waits for long if it is longer than that, and than so many steps."""


class Verdict(Enum):
    """The state of a run. `dead` is a run in which work is left and no function is alive."""

    RUNNING = "running"
    WAITING = "waiting"
    DEAD = "dead"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def exit_code(self) -> int:
        """The exit code of `funcpipe run status`: 0 while all is well, 1 for a failed run, 3 without workers."""
        return {Verdict.FAILED: 1, Verdict.DEAD: 3}.get(self, 0)


def judge(
    record: RunRecord,
    life: RunLiveness,
    halt: Halt | None,
    failure: str | None,
    *,
    saved_step: int,
    stopped_step: int | None = None,
) -> tuple[Verdict, str]:
    """The verdict on a run, and why. `failure` is the one that has ended the run, if there is one; a validation has
    ended it after `stopped_step` steps, if one has.
    """
    saved = f"step {saved_step} of {record.steps} is saved"
    if failure is not None:
        return Verdict.FAILED, f"{failure}; {saved}"
    if life.ended(WorkerState.FINISHED):
        return Verdict.FINISHED, how_finished(record, record.steps if stopped_step is None else stopped_step)
    if life.ended(WorkerState.FINISHED, WorkerState.HALTED):
        return Verdict.STOPPED, f"{'it was ended' if halt is None else halt.reason}; {saved}"
    if life.is_dead:
        return Verdict.DEAD, f"{_how_dead(life)}, last heartbeat {_clock_time(life.last_seen_at_s)}, {saved}"
    if life.lost:
        return Verdict.WAITING, f"for worker {_describe_lost(life.lost[0])}, which is to be started again; {saved}"
    if (waited := _longest_wait(life.workers)) is not None:
        worker, since_s = waited
        return Verdict.WAITING, f"for worker {worker} since {_clock_time(since_s)}"
    done = min((record.first_step if w.beat is None else w.beat.step for w in life.workers), default=record.first_step)
    return Verdict.RUNNING, f"step {done} of {record.steps} is done"


def how_finished(record: RunRecord, step: int) -> str:
    """The end of a run after `step` steps, in words."""
    if step < record.steps:
        return f"it ended early, after step {step} of {record.steps}, as validations were no better"
    return f"all {record.steps} steps are done"


def _describe_lost(worker: WorkerLiveness) -> str:
    """The name of a lost worker, and the cause."""
    if worker.report is not None:
        return f"{worker.worker}, whose attempt {worker.attempt} failed ({worker.report.error})"
    if worker.state is WorkerState.DEAD:
        return f"{worker.worker}, whose function has ended" + (f" ({worker.reason})" if worker.reason else "")
    beat_at_s = None if worker.beat is None else worker.beat.sent_at_s
    return f"{worker.worker}, last heartbeat {_clock_time(beat_at_s)}"


def _longest_wait(workers: Sequence[WorkerLiveness]) -> tuple[str, float] | None:
    """The worker that others have waited for longest, and since when, if that is long.

    A worker that is waited for may wait itself: the last in the chain is named.
    """
    beats = {worker.worker: worker.beat for worker in workers if worker.at_work and worker.beat is not None}
    waits = {name: wait for name, beat in beats.items() if (wait := _long_wait(beat)) is not None}
    if not waits:
        return None
    waiter = max(waits, key=lambda name: waits[name].since_s)
    return _last_awaited(waiter, waits), beats[waiter].sent_at_s - waits[waiter].since_s


def _last_awaited(waiter: str, waits: Mapping[str, Busy]) -> str:
    """The worker at the end of the chain of those that wait for each other, beginning with `waiter`."""
    seen = [waiter]
    while seen[-1] in waits:
        awaited = _awaited_worker(waits[seen[-1]])
        if awaited in seen:
            break
        seen.append(awaited)
    return seen[-1]


def _only_wait(beat: Heartbeat) -> Busy | None:
    """The longest wait of a worker, if it does nothing else."""
    waits = [busy for busy in beat.busy if busy.awaits is not None]
    return max(waits, key=lambda busy: busy.since_s) if waits and len(waits) == len(beat.busy) else None


def _awaited_worker(wait: Busy) -> str:
    """The worker whose object a lane waits for."""
    task = Task.parse(str(wait.awaits))
    return worker_name(task.stage, task.replica)


def _clock_time(at_s: float | None) -> str:
    """A time of the day in this machine's zone, with the date if that is not today."""
    if at_s is None:
        return "never"
    when = time.localtime(at_s)
    today = when[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", when)


def _how_dead(life: RunLiveness) -> str:
    if all(worker.state is not WorkerState.SILENT for worker in life.workers):
        return "all functions have ended"
    return "no function sends heartbeats any more"


def _long_wait(beat: Heartbeat) -> Busy | None:
    wait = _only_wait(beat)
    return wait if wait is not None and wait.since_s > max(_LONG_S, _LONG_STEPS * beat.step_s) else None


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
    worker = _last_awaited(waiter, waits)
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
        "leave such steps out: on_nan='skip' (--set training.on-nan=skip)"
    )


def _missing(storage: Storage, keys: Keys, report: WorkerReport) -> str:
    """The worker whose work an attempt has waited for too long."""
    waited = str(report.error).removeprefix(f"{DeadlineExceeded.__name__}: ")
    if report.task is None:
        return f"worker {report.worker} waited too long: {waited}"
    wait = Busy(lane="download", task=report.task, since_s=0.0, awaits=str(source_of(Task.parse(report.task))))
    waits = {report.worker: wait} | _waits(storage, keys, _awaited_worker(wait))
    missing = _last_awaited(report.worker, waits)
    return (
        f"the work of worker {missing} is missing: {waited}; worker {report.worker} waited for it in task "
        f"{report.task}. Worker {_last_seen(storage, keys, missing)}"
    )


def _waits(storage: Storage, keys: Keys, waiter: str) -> dict[str, Busy]:
    """The waits of the workers on which `waiter` depends, by their last heartbeats; those that compute have none."""
    waits: dict[str, Busy] = {}
    while waiter not in waits:
        beat = newest_heartbeat(storage, keys, waiter)
        wait = None if beat is None else _only_wait(beat)
        if wait is None:
            break
        waits[waiter] = wait
        waiter = _awaited_worker(wait)
    return waits


def _last_seen(storage: Storage, keys: Keys, worker: str) -> str:
    beat = newest_heartbeat(storage, keys, worker)
    if beat is None:
        return f"{worker} never sent a heartbeat"
    doing = ", ".join(f"{busy.task} for {busy.since_s:.1f} s" for busy in beat.busy)
    return (
        f"{worker} sent its last heartbeat at {_clock_time(beat.sent_at_s)}, after step {beat.step} of {beat.steps}"
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
