"""Follow a run step by step to its end and collect what it leaves, or collect what a finished run has left."""

import logging
import time

from funcpipe.client.failures import awaited_by
from funcpipe.client.prepare import PreparedRun
from funcpipe.client.results import OnProgress, Progress, RunResult, collect
from funcpipe.client.supervisor import POLL_S, Supervisor
from funcpipe.core import OnDrift, RunRecord, StepReport, worker_name
from funcpipe.errors import DeadlineExceeded, ReplicasDiffer
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import Owner
from funcpipe.runstate.replica_marks import last_differences
from funcpipe.runstate.resume import ResumePoint
from funcpipe.runstate.step_reports import StepReader

_log = logging.getLogger(__name__)


def follow(
    prepared: PreparedRun, keys: Keys, supervisor: Supervisor, on_progress: OnProgress, owner: Owner
) -> RunResult:
    """Watch the run step by step until all its workers have ended; returns what it leaves."""
    job, known, reader = prepared.job, prepared.running or prepared.resumed, StepReader(prepared.storage, keys)
    losses = list(known.losses) if known is not None else []
    samples, first, began_s = 0, len(losses), None
    for step in range(first, job.steps):
        reports, waited = _await_step(prepared, reader, supervisor, step, owner)
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
                cost_usd=supervisor.cost_usd() + (step + 1 - first) * _step_request_usd(prepared),
                elapsed_s=supervisor.elapsed_s(),
            )
        )
    supervisor.wait(job.message_deadline_s)
    _compare_replicas(prepared, keys)
    earlier_usd = prepared.running.spent_usd if prepared.running is not None else prepared.account.spent_usd
    return collect(
        prepared.storage,
        keys,
        job.plan,
        job.prices,
        losses=tuple(losses),
        watched=supervisor.functions(),
        earlier_usd=earlier_usd,
    )


def collect_finished(prepared: PreparedRun, record: RunRecord, end: ResumePoint, on_progress: OnProgress) -> RunResult:
    """What a run has left whose functions have done all its steps and ended. `end` is what they had learned by then."""
    keys, account = Keys.of(record), prepared.account
    for step in range(record.first_step, record.steps):
        on_progress(
            Progress(
                step=step + 1,
                steps=record.steps,
                loss=end.losses[step],
                samples_per_s=0.0,
                cost_usd=account.spent_usd + (step + 1 - record.first_step) * _step_request_usd(prepared),
                elapsed_s=account.elapsed_s,
            )
        )
    _compare_replicas(prepared, keys)
    return collect(
        prepared.storage,
        keys,
        prepared.job.plan,
        prepared.job.prices,
        losses=end.losses,
        trained=end.state,
        earlier_usd=record.spent_usd,
    )


def _step_request_usd(prepared: PreparedRun) -> float:
    """Dollars for the requests of a step, as the plan expects them."""
    estimate = prepared.job.plan.estimate
    return 0.0 if estimate is None else estimate.request_usd


def _compare_replicas(prepared: PreparedRun, keys: Keys) -> None:
    """Tell which replicas do not hold, at the end, what the first one of their stage holds, which is the result."""
    plan = prepared.job.plan
    differences = last_differences(
        prepared.storage, keys, stages=len(plan.stages), replicas=plan.replicas, steps=prepared.job.steps
    )
    for found in differences:
        _log.warning("run %s: %s; the result is the first replica's", keys.run, found)
    if differences and prepared.faults.on_drift is OnDrift.FAIL:
        raise ReplicasDiffer(f"run {keys.run}: {differences[0]}; --on-drift copy would have told so, and gone on")


def _await_step(
    prepared: PreparedRun, reader: StepReader, supervisor: Supervisor, step: int, owner: Owner
) -> tuple[list[StepReport], bool]:
    """What the replicas of the last stage report of `step`, and whether this client had to wait for it.

    Functions are looked after meanwhile. They know best which message has not come in time, and first have to start:
    this client gives up only some time after them.
    """
    job, keys, reports, waited = prepared.job, reader.keys, [], False
    deadline_s = job.message_deadline_s + prepared.faults.cold_start_s + prepared.faults.start_s
    for replica in range(job.plan.replicas):
        worker = worker_name(len(job.plan.stages) - 1, replica)
        until_s = time.monotonic() + deadline_s
        while (report := reader.find(step, worker)) is None:
            owner.check()
            supervisor.poll()
            if time.monotonic() > until_s:
                awaited = awaited_by(prepared.storage, keys, worker)
                why = f"; it waits for {awaited}" if awaited else ""
                raise DeadlineExceeded(f"run {keys.run}: {worker} has not ended step {step} in {deadline_s:g} s{why}")
            waited = True
            time.sleep(POLL_S)
        reports.append(report)
    return reports, waited
