"""Start a prepared run, follow it to its end, collect what it leaves, and clean up behind it."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from funcpipe.client.prepare import PreparedRun
from funcpipe.client.results import Progress, RunResult, collect, step_report
from funcpipe.client.supervisor import POLL_S, Supervisor
from funcpipe.client.upload import upload
from funcpipe.core import RunRecord, StepReport, worker_name
from funcpipe.errors import DeadlineExceeded, PlanError, RunInterrupted
from funcpipe.platforms.base import Storage
from funcpipe.platforms.local.log_files import kept_by_client
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.generations import (
    delete_generation,
    delete_run,
    load_worker_specs,
    reserve_generation,
    write_record,
)
from funcpipe.runstate.keys import Keys

_log = logging.getLogger(__name__)

OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """Do nothing when a step has ended."""


def launch(prepared: PreparedRun, on_progress: OnProgress = ignore_progress) -> RunResult:
    """Train, or watch the run if functions are training it already, and collect what it leaves.

    Raises WorkerFailed, RunHalted or DeadlineExceeded, naming run, worker and task. A worker that dies is restarted. At
    the end no function runs and no object of the run is left, except what is kept of a failed run to resume it.
    Ctrl-C ends a run that was started here, and lets one that was only watched go on: RunInterrupted says which.
    """
    if prepared.running is not None:
        return _watch(prepared, prepared.running, on_progress)
    keys = reserve_generation(prepared.storage, prepared.name)
    kept = prepared.faults.keep
    try:
        with (
            kept_by_client(keys.run),
            _objects_removed(prepared.storage, keys, keep=kept),
            _supervisor(prepared, keys) as supervisor,
        ):
            _start(prepared, keys, supervisor)
            return _follow(prepared, keys, supervisor, on_progress)
    except KeyboardInterrupt:
        raise RunInterrupted(keys.run, running=False, kept=kept, storage=prepared.storage_url) from None


def launch_detached(prepared: PreparedRun) -> str:
    """Start the run and leave it to itself; returns its name. Raises PlanError if it runs already."""
    if prepared.running is not None:
        raise PlanError(f"run {prepared.name} still runs; there is nothing to resume")
    keys = reserve_generation(prepared.storage, prepared.name)
    with kept_by_client(keys.run), _supervisor(prepared, keys) as supervisor:
        _start(prepared, keys, supervisor)
        supervisor.detach()
    return keys.run


def _watch(prepared: PreparedRun, record: RunRecord, on_progress: OnProgress) -> RunResult:
    """Follow a run that others have started, and remove its objects when it has finished."""
    keys = Keys(record.run, record.generation)
    _log.info("run %s: watches generation %d, which still runs", keys.run, keys.generation)
    try:
        with kept_by_client(keys.run), _supervisor(prepared, keys) as supervisor:
            for spec in load_worker_specs(prepared.storage, keys):
                supervisor.attach(spec)
            result = _follow(prepared, keys, supervisor, on_progress)
    except KeyboardInterrupt:
        raise RunInterrupted(keys.run, running=True, kept=True, storage=prepared.storage_url) from None
    delete_run(prepared.storage, keys)
    return result


def _supervisor(prepared: PreparedRun, keys: Keys) -> Supervisor:
    return Supervisor(prepared.platform, prepared.storage, keys, prices=prepared.job.prices, account=prepared.account)


def _start(prepared: PreparedRun, keys: Keys, supervisor: Supervisor) -> None:
    """Upload the run and start its functions. If that fails, the run is what it was before."""
    try:
        for spec in upload(prepared, keys):
            put_document(prepared.storage, keys.payload(spec.worker), spec)
            supervisor.start(spec)
        write_record(prepared.storage, keys, _record(prepared, keys))
    except BaseException:
        _log.warning("run %s: could not be started; what was uploaded is deleted", keys.run)
        supervisor.stop()
        delete_generation(prepared.storage, keys)
        raise
    if prepared.resumed is not None:
        delete_generation(prepared.storage, prepared.resumed.keys)


def _record(prepared: PreparedRun, keys: Keys) -> RunRecord:
    job, resumed = prepared.job, prepared.resumed
    return RunRecord(
        run=keys.run,
        generation=keys.generation,
        plan=job.plan,
        platform=prepared.platform.url,
        storage=prepared.storage_url,
        samples=job.samples,
        epochs=job.epochs,
        steps=job.steps,
        first_step=resumed.step if resumed is not None else 0,
        seed=job.seed,
        shuffle=job.shuffle,
        clip_grad_norm=job.clip_grad_norm,
        losses=resumed.losses if resumed is not None else (),
        spent_usd=prepared.account.spent_usd,
        elapsed_s=prepared.account.elapsed_s,
    )


def _follow(prepared: PreparedRun, keys: Keys, supervisor: Supervisor, on_progress: OnProgress) -> RunResult:
    """Watch the run step by step until all its workers have ended; returns what it leaves."""
    job, known = prepared.job, prepared.running or prepared.resumed
    losses = list(known.losses) if known is not None else []
    request_usd = job.plan.estimate.request_usd if job.plan.estimate is not None else 0.0
    samples, first, began_s = 0, len(losses), None
    for step in range(first, job.steps):
        reports, waited = _await_step(prepared, keys, supervisor, step)
        supervisor.step_ended()
        step_samples = sum(report.samples for report in reports)
        losses.append(sum(report.loss_sum for report in reports) / step_samples)
        if began_s is not None:
            samples += step_samples
        elif waited:  # the first step that this client saw end: from here on it knows how fast the run is
            began_s = time.monotonic()
        on_progress(
            Progress(
                step=step + 1,
                steps=job.steps,
                loss=losses[-1],
                samples_per_s=0.0 if began_s is None else samples / max(time.monotonic() - began_s, POLL_S),
                cost_usd=supervisor.cost_usd() + (step + 1 - first) * request_usd,
                elapsed_s=supervisor.elapsed_s(),
            )
        )
    supervisor.wait(job.message_deadline_s)
    earlier_usd = prepared.running.spent_usd if prepared.running is not None else prepared.account.spent_usd
    return collect(
        prepared.storage,
        keys,
        job.plan,
        job.prices,
        losses=tuple(losses),
        functions=supervisor.functions(),
        earlier_usd=earlier_usd,
    )


def _await_step(prepared: PreparedRun, keys: Keys, supervisor: Supervisor, step: int) -> tuple[list[StepReport], bool]:
    """What the replicas of the last stage report of `step`, and whether this client had to wait for it.

    Functions are looked after meanwhile. They know best which message has not come in time, and first have to start:
    this client gives up only some time after them.
    """
    job, reports, waited = prepared.job, [], False
    deadline_s = job.message_deadline_s + prepared.faults.cold_start_s + prepared.faults.start_s
    for replica in range(job.plan.replicas):
        worker = worker_name(len(job.plan.stages) - 1, replica)
        until_s = time.monotonic() + deadline_s
        while (report := step_report(prepared.storage, keys, step, worker)) is None:
            supervisor.poll()
            if time.monotonic() > until_s:
                raise DeadlineExceeded(
                    f"run {keys.run}: worker {worker} has not ended step {step} within {deadline_s:g} s"
                )
            waited = True
            time.sleep(POLL_S)
        reports.append(report)
    return reports, waited


@contextlib.contextmanager
def _objects_removed(storage: Storage, keys: Keys, *, keep: bool) -> Iterator[None]:
    """Delete every object of the run at the end; with `keep`, not of a run that has failed and can be resumed."""
    try:
        yield
    except BaseException as error:
        if not keep:
            _log.info("run %s: its objects are deleted after %s", keys.run, type(error).__name__)
            delete_run(storage, keys)
        raise
    _log.info("run %s: has finished; its objects are deleted", keys.run)
    delete_run(storage, keys)
