"""The end of a run that has done all its steps: its model is kept, or all of it is deleted; and what is kept, read."""

import logging
from collections.abc import Iterable
from dataclasses import replace

from funcpipe.client.follow.export import TrainedLoss
from funcpipe.client.follow.results import NOTHING_LEARNED, OnProgress, Progress, RunResult, collect, load_trace
from funcpipe.client.follow.steps import compare_replicas, load_outputs
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import FinishedRun, ValidationReport
from funcpipe.errors import RunUnknown
from funcpipe.runstate.finished import ended_step, keep_only_model, last_checkpoint
from funcpipe.runstate.generations import find_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import Owner
from funcpipe.runstate.reader import History, RunReader, spent_so_far
from funcpipe.runstate.resume import ResumePoint

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
        bill=billed(prepared, result).bill,
        workers=result.workers,
        elapsed_s=spent_so_far(storage, record).elapsed_s,
        kept_bytes=size,
    )
    keep_only_model(storage, record, finished, checkpoint)


def billed(prepared: PreparedRun, result: RunResult) -> RunResult:
    """`result`, whose bill is for functions alone, with this client's requests until now."""
    client, job = prepared.meter.by_kind, prepared.job
    return replace(result, bill=result.bill.with_client(client, job.prices, job.plan.stores))


def collect_finished(prepared: PreparedRun, reader: RunReader, end: ResumePoint, on_progress: OnProgress) -> RunResult:
    """The result of a run whose functions have done all its steps and ended. `end` is what they had learned by then."""
    record, account = reader.record, prepared.account
    past = Progress(
        step=record.first_step,
        steps=record.steps,
        loss=0.0,
        samples_per_s=0.0,
        cost_usd=account.spent_usd + account.requests_usd,
        elapsed_s=account.elapsed_s,
    )
    history = History(losses=end.losses, skipped_steps=end.skipped_steps, learning_rates=end.learning_rates)
    _retell(on_progress, past, history, began_step=record.began_step, validations=reader.validations)
    compare_replicas(prepared, reader.keys, end.step)
    return collect(
        reader,
        prepared.job.prices,
        steps=record.steps,
        losses=end.losses,
        skipped_steps=end.skipped_steps,
        trained=end.state if prepared.job.epochs else NOTHING_LEARNED,
        opened=prepared.opens_result,
        outputs=load_outputs(prepared.storage, reader.keys, prepared.job),
        validations=(*record.validations, *(report for report in reader.validations if report.step <= end.step)),
    )


def collect_kept(prepared: PreparedRun, reader: RunReader, finished: FinishedRun, on_progress: OnProgress) -> RunResult:
    """The result of a run that has finished and was collected before, with the bill of that time."""
    record, validations = reader.record, (*reader.record.validations, *reader.validations)
    past = Progress(
        step=record.began_step,
        steps=record.steps,
        loss=0.0,
        samples_per_s=0.0,
        cost_usd=finished.bill.cost_usd,
        elapsed_s=finished.elapsed_s,
    )
    history = History(losses=finished.losses, skipped_steps=finished.skipped_steps)
    _retell(on_progress, past, history, began_step=record.began_step, validations=validations)
    resumed, ended = prepared.resumed, ended_step(record, finished.losses)
    learned = None if resumed is None or resumed.step != ended else resumed.state
    opened = prepared.opens_result
    learned, best = learned or reader.model(ended, opened=opened), reader.best_models(validations, opened=opened)
    return RunResult(
        run=record.run,
        losses=finished.losses,
        skipped_steps=finished.skipped_steps,
        tensors=learned.state_dict(),
        trace=load_trace(reader, prepared.job.prices),
        bill=finished.bill,
        workers=finished.workers,
        attributes=learned.attributes(),
        averaged=learned.averaged_state_dict(),
        learned=learned,
        validations=validations,
        best_models={step: model.state_dict() for step, model in best.items()},
        loss=TrainedLoss.of(learned, next(iter(best.values()), None)),
    )


def _retell(
    on_progress: OnProgress,
    past: Progress,
    history: History,
    *,
    began_step: int,
    validations: Iterable[ValidationReport],
) -> None:
    """Report the steps of `history` after that of `past`, which has what they share, and their `validations`."""
    validated = {report.step: report for report in validations}
    for step in range(past.step, began_step + len(history.losses)):
        progress = replace(
            past,
            step=step + 1,
            loss=history.losses[step - began_step],
            skipped=sum(number <= step for number in history.skipped_steps),
            learning_rate=history.learning_rates.get(step),
        )
        on_progress(progress)
        if progress.step in validated:
            on_progress(replace(progress, validation=validated[progress.step]))
