"""The verdict on a run as a whole: that it runs, waits, has died, finished, stopped or failed, and why."""

import time
from collections.abc import Mapping, Sequence
from enum import Enum

from funcpipe.core import Busy, Halt, Heartbeat, RunRecord, worker_name
from funcpipe.runstate.liveness import RunLiveness, WorkerLiveness, WorkerState
from funcpipe.scheduler.tasks import Task

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
        return Verdict.DEAD, f"{_how_dead(life)}, last heartbeat {clock_time(life.last_seen_at_s)}, {saved}"
    if life.lost:
        return Verdict.WAITING, f"for worker {describe_lost(life.lost[0])}, which is to be started again; {saved}"
    if (waited := longest_wait(life.workers)) is not None:
        worker, since_s = waited
        return Verdict.WAITING, f"for worker {worker} since {clock_time(since_s)}"
    done = min((record.first_step if w.beat is None else w.beat.step for w in life.workers), default=record.first_step)
    return Verdict.RUNNING, f"step {done} of {record.steps} is done"


def how_finished(record: RunRecord, step: int) -> str:
    """The end of a run after `step` steps, in words."""
    if step < record.steps:
        return f"it ended early, after step {step} of {record.steps}, as validations were no better"
    return f"all {record.steps} steps are done"


def describe_lost(worker: WorkerLiveness) -> str:
    """The name of a lost worker, and the cause."""
    if worker.report is not None:
        return f"{worker.worker}, whose attempt {worker.attempt} failed ({worker.report.error})"
    if worker.state is WorkerState.DEAD:
        return f"{worker.worker}, whose function has ended" + (f" ({worker.reason})" if worker.reason else "")
    beat_at_s = None if worker.beat is None else worker.beat.sent_at_s
    return f"{worker.worker}, last heartbeat {clock_time(beat_at_s)}"


def longest_wait(workers: Sequence[WorkerLiveness]) -> tuple[str, float] | None:
    """The worker that others have waited for longest, and since when, if that is long.

    A worker that is waited for may wait itself: the last in the chain is named.
    """
    beats = {worker.worker: worker.beat for worker in workers if worker.at_work and worker.beat is not None}
    waits = {name: wait for name, beat in beats.items() if (wait := _long_wait(beat)) is not None}
    if not waits:
        return None
    waiter = max(waits, key=lambda name: waits[name].since_s)
    return last_awaited(waiter, waits), beats[waiter].sent_at_s - waits[waiter].since_s


def last_awaited(waiter: str, waits: Mapping[str, Busy]) -> str:
    """The worker at the end of the chain of those that wait for each other, beginning with `waiter`."""
    seen = [waiter]
    while seen[-1] in waits:
        awaited = awaited_worker(waits[seen[-1]])
        if awaited in seen:
            break
        seen.append(awaited)
    return seen[-1]


def only_wait(beat: Heartbeat) -> Busy | None:
    """The longest wait of a worker, if it does nothing else."""
    waits = [busy for busy in beat.busy if busy.awaits is not None]
    return max(waits, key=lambda busy: busy.since_s) if waits and len(waits) == len(beat.busy) else None


def awaited_worker(wait: Busy) -> str:
    """The worker whose object a lane waits for."""
    task = Task.parse(str(wait.awaits))
    return worker_name(task.stage, task.replica)


def clock_time(at_s: float | None) -> str:
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
    wait = only_wait(beat)
    return wait if wait is not None and wait.since_s > max(_LONG_S, _LONG_STEPS * beat.step_s) else None
