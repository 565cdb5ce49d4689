"""The end of a run that has done all its steps: its model is kept, or all of it is deleted; and what is kept, read."""

import logging
from dataclasses import replace

from funcpipe.client.follow.export import TrainedLoss
from funcpipe.client.follow.results import OnProgress, Progress, RunResult, best_state, load_trace, load_trained
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import Bill, FinishedRun, RunRecord
from funcpipe.errors import RunUnknown
from funcpipe.runstate.finished import ended_step, keep_only_model, last_checkpoint
from funcpipe.runstate.generations import find_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import Owner
from funcpipe.runstate.reports import ValidationKeys, load_reports
from funcpipe.runstate.spending import spent_so_far

_log = logging.getLogger(__name__)


def finish(prepared: PreparedRun, keys: Keys, owner: Owner, result: RunResult) -> None:
    """Keep the model of a run that has left `result`, or delete the run, as was wanted."""
    if not prepared.keeps_model or not prepared.job.epochs:
        _log.info("run %s: has finished; its objects are deleted", keys.run)
        owner.delete_run()
        return
    storage = owner.storage
    record = find_record(storage, keys)
    if record is None:
        raise RunUnknown(f"run {keys.run} has lost its record, so that its model cannot be kept")
    checkpoint, size = last_checkpoint(storage, record, ended_step(record, result.losses))
    finished = FinishedRun(
        losses=result.losses,
        skipped_steps=result.skipped_steps,
        bill=billed(prepared, result.bill),
        workers=result.workers,
        elapsed_s=spent_so_far(storage, record).elapsed_s,
        kept_bytes=size,
    )
    keep_only_model(storage, record, finished, checkpoint)


def billed(prepared: PreparedRun, bill: Bill) -> Bill:
    """`bill`, made for functions alone, with this client's requests until now."""
    return bill.with_client(prepared.meter.by_kind, prepared.job.prices, prepared.job.plan.stores)


def collect_kept(prepared: PreparedRun, record: RunRecord, finished: FinishedRun, on_progress: OnProgress) -> RunResult:
    """The result of a run that has finished and was collected before, with the bill of that time."""
    keys = Keys.of(record)
    reports = (*record.validations, *load_reports(prepared.storage, ValidationKeys.of(record)))
    validated = {report.step: report for report in reports}
    for step, loss in enumerate(finished.losses, start=record.began_step + 1):
        progress = Progress(
            step=step,
            steps=record.steps,
            loss=loss,
            samples_per_s=0.0,
            cost_usd=finished.bill.cost_usd,
            elapsed_s=finished.elapsed_s,
            skipped=sum(skipped < step for skipped in finished.skipped_steps),
        )
        on_progress(progress)
        if step in validated:
            on_progress(replace(progress, validation=validated[step]))
    resumed, ended = prepared.resumed, ended_step(record, finished.losses)
    learned = None if resumed is None or resumed.step != ended else resumed.state
    if learned is None:
        learned = load_trained(prepared.storage, keys, len(record.plan.stages), ended)
    best = best_state(prepared.storage, keys, len(record.plan.stages), reports)
    return RunResult(
        run=keys.run,
        losses=finished.losses,
        skipped_steps=finished.skipped_steps,
        tensors=learned.state_dict(),
        trace=load_trace(prepared.storage, keys, record.plan, prepared.job.prices),
        bill=finished.bill,
        workers=finished.workers,
        attributes=learned.attributes(),
        averaged=learned.averaged_state_dict(),
        learned=learned,
        validations=reports,
        best=None if best is None else best.state_dict(),
        loss=TrainedLoss.of(learned, best),
    )
