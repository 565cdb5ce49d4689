"""A run that ends early: interrupted, it saves a step; and the error of any says how to go on."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from funcpipe.client.control.commands import after_failure, after_interrupt, after_removal, before_start
from funcpipe.client.control.stopping import order_end
from funcpipe.client.follow.supervisor import Supervisor
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.errors import DeadlineExceeded, RunError, RunHalted, RunInterrupted, RunTaken, RunUnknown, Superseded
from funcpipe.platforms.base import Storage
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.liveness import read_heartbeats
from funcpipe.runstate.owner import Owner
from funcpipe.runstate.reader import RunReader

_log = logging.getLogger(__name__)

REASON = "it was interrupted"

_BEATS, _STEPS, _LEAST_S = 4, 4, 5.0
"""The wait for a save: the order leaves two heartbeats for all functions to receive it, and a busy machine may hold up
functions for seconds, however short heartbeats and steps are.
"""

_MEASURE_S = 0.5
"""Seconds to measure the present pace of steps: earlier ones may have been slower."""


@contextlib.contextmanager
def saved_if_interrupted(prepared: PreparedRun, keys: Keys, supervisor: Supervisor) -> Iterator[None]:
    """Have a run that trains save a step and end if this client is interrupted, or its program ends, in this context.

    A second interrupt ends it at once.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if prepared.faults.keep and prepared.job.epochs:
            try:
                _save(prepared, keys, supervisor)
            except Superseded:
                raise  # another client supervises the functions
            except RunError as error:
                _log.warning("run %s: no further step is saved: %s", keys.run, error)
        raise


def _save(prepared: PreparedRun, keys: Keys, supervisor: Supervisor) -> None:
    """Order the run to end after a step by which all functions have the order, and wait until it has."""
    storage, heartbeat_s = prepared.storage, prepared.faults.heartbeat_s
    record = newest_record(storage, keys.run)
    beats = [beat for beat in read_heartbeats(storage, record) if beat is not None]
    before, measured_s = _reported(storage, keys), min(_MEASURE_S, heartbeat_s)
    time.sleep(measured_s)
    reported = _reported(storage, keys)
    paces_s = [measured_s / (reported - before)] if reported > before else []
    step_s = min([*paces_s, *(beat.step_s for beat in beats if beat.step_s)], default=0.0)
    done = max([record.first_step, reported, *(beat.step for beat in beats)])
    notice = 2 + (int(2 * heartbeat_s / step_s) if step_s else 0)  # functions are a step ahead at most
    order_end(storage, keys, done=done, notice=notice, reason=REASON)
    limit_s = max(_BEATS * heartbeat_s + _STEPS * step_s, _LEAST_S)
    _log.warning(
        "run %s: %s; it saves step %d and ends, for which it has %.0f s; another interrupt ends it at once",
        *(keys.run, REASON, min(done + notice, record.steps), limit_s),
    )
    try:
        supervisor.wait(limit_s)
    except RunHalted:
        return
    except DeadlineExceeded as error:
        raise DeadlineExceeded(f"{limit_s:.0f} s after the interrupt its functions have not ended") from error


def _reported(storage: Storage, keys: Keys) -> int:
    steps = (int(key.removeprefix(keys.step_reports).partition(".")[0]) for key in storage.list(keys.step_reports))
    return max(steps, default=-1) + 1


def interrupted(prepared: PreparedRun, *, kept: bool, running: bool = False) -> RunInterrupted:
    """The error to raise, with what can be done now as a note."""
    saved_step = None
    if kept and not running:
        with contextlib.suppress(RunError):
            saved_step = _saved_step(prepared)
    error = RunInterrupted(
        prepared.name,
        running=running,
        kept=kept,
        storage=prepared.storage_url,
        saved_step=saved_step,
        steps=prepared.job.steps,
    )
    if notes := after_interrupt(error):
        error.add_note("\n".join(notes))
    return error


def _saved_step(prepared: PreparedRun) -> int:
    try:
        reader = RunReader.newest(prepared.storage, prepared.name)
    except RunUnknown:
        return 0
    if reader.finished is not None:
        return reader.record.steps
    return reader.index.common_step(len(reader.record.plan.stages), reader.record.plan.replicas)


@contextlib.contextmanager
def with_next_commands(prepared: PreparedRun, *, kept: bool) -> Iterator[threading.Event]:
    """Add to a failure the commands that help, as a note: tracebacks and the command line show it.

    The event that it yields must be set once a new run has begun: until then nothing of it is kept.
    """
    begun = threading.Event()
    if prepared.resumed is not None or prepared.running is not None:
        begun.set()
    try:
        yield begun
    except (RunTaken, RunUnknown, Superseded):  # the run is another client's, which goes on with it, or is gone
        raise
    except RunError as error:
        run = prepared.name
        storage, platform = prepared.storage_url, prepared.platform.url
        commands = after_failure(run, storage, expires=prepared.expires) if kept else after_removal(run, platform)
        error.add_note("\n".join(commands if begun.is_set() else before_start(run)))
        raise


@contextlib.contextmanager
def removed_if_it_fails(owner: Owner, run: str, *, keep: bool) -> Iterator[None]:
    """Delete every object of a run that fails; with `keep` they stay, and the run can be resumed."""
    try:
        yield
    except Superseded:
        raise  # the run is another client's
    except BaseException as error:
        if not keep:
            _log.info("run %s: its objects are deleted after %s", run, type(error).__name__)
            owner.delete_run()
        raise
