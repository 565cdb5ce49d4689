"""The point where a run can be resumed, under the same or another plan: the newest step that all its stages have saved.

Any object may be damaged or gone by then. A checkpoint that cannot be read costs the steps since the one before it; a
loss that can be read nowhere is unknown; and what the run has cost is what the rest of its documents say.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from funcpipe.comm import codec
from funcpipe.core import FinishedRun, RunRecord, ValidationReport, worker_name
from funcpipe.core.texts import counted
from funcpipe.errors import CorruptMessage, KeyMissing, RunUnknown
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoint_index import CheckpointIndex
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.finished import ended_step, find_finished
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.reports import ValidationKeys, load_reported, load_reports
from funcpipe.runstate.validations import BestModel
from funcpipe.training.sharding import unshard
from funcpipe.training.state import StageState, merge_stages

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The state of the whole model after `step` steps, the loss of each, and which of them updated nothing.

    `state` is None if nothing was saved, so that training starts from the beginning. The losses are those of the steps
    from `began_step` on, where the run has begun. `validations` are those before `step`, whose `best` model is None if
    it was not kept. With `stopped`, the run has ended early there, after the last of them. `learning_rates` are those
    of the newest generation's steps, as far as they were reported.
    """

    keys: Keys
    step: int
    state: StageState | None
    losses: tuple[float, ...]
    began_step: int = 0
    skipped_steps: tuple[int, ...] = ()
    learning_rates: Mapping[int, float] = field(default_factory=dict)
    validations: tuple[ValidationReport, ...] = ()
    best: StageState | None = None
    stopped: bool = False


def load_resume_point(storage: Storage, record: RunRecord, *, from_start: bool = False) -> ResumePoint:
    """Return the newest point at which the run can be resumed, with its state; with `from_start`, its beginning.

    Raises RunUnknown if all that the run has saved is damaged, or if its beginning is not kept.
    """
    keys, finished = Keys.of(record), find_finished(storage, Keys.of(record))
    if from_start:
        _check_has_start(record, finished)
        return ResumePoint(keys=keys, step=0, state=None, losses=())
    checkpoints = Checkpoints(storage, keys, first_step=record.first_step)
    index, stages = checkpoints.index(), len(record.plan.stages)
    reported = _reported_step(storage, record, index) if finished is None else ended_step(record, finished.losses)
    damaged = []
    for step in index.common_steps(stages):
        manifests = [index.manifests(stage, step) for stage in range(stages)]
        if step > reported or not all(manifests):
            continue
        try:
            states = [unshard(checkpoints.load_combined(stage, own)) for stage, own in enumerate(manifests)]
        except (CorruptMessage, KeyMissing) as error:
            _log.warning("run %s: the checkpoint after step %d cannot be read: %s", keys.run, step, error)
            damaged.append(str(error))
            continue
        if step < reported:
            again = counted(reported - step, "step")
            _log.warning("run %s: goes on after step %d, and repeats %s", keys.run, step, again)
        if finished is not None:
            losses, skipped, rates = finished.losses, finished.skipped_steps, dict[int, float]()
        else:
            losses, skipped, rates = _reported(storage, record, step)
        reports = load_reports(storage, ValidationKeys.of(record))
        stopped = any(report.stop and report.step == step for report in reports)
        own = (report for report in reports if report.step < step or (stopped and report.step == step))
        validations = (*record.validations, *own)
        return ResumePoint(
            keys=keys,
            step=step,
            state=merge_stages(states),
            losses=losses,
            began_step=record.began_step,
            skipped_steps=skipped,
            learning_rates=rates,
            validations=validations,
            best=_best(storage, record, validations),
            stopped=stopped,
        )
    if finished is not None:
        raise RunUnknown(
            f"run {keys.run} has finished, but its model cannot be read: {'; '.join(damaged) or 'it is gone'}; "
            f"delete what is left (funcpipe run clean {keys.run}), and train again"
        )
    if damaged or record.first_step:
        raise RunUnknown(
            f"run {keys.run}: no checkpoint can be read: {'; '.join(damaged) or 'there is none'}; resume it with "
            "--from-start (in Python: from_start=True) to train again from the parameters that were uploaded"
        )
    if reported:
        _log.warning("run %s: nothing is saved; it begins again, and repeats %s", keys.run, counted(reported, "step"))
    return ResumePoint(keys=keys, step=0, state=None, losses=())


def _check_has_start(record: RunRecord, finished: FinishedRun | None) -> None:
    """Raise RunUnknown unless the parameters that the run began with are there, and all that it began with."""
    if finished is not None:
        raise RunUnknown(
            f"run {record.run} has finished, and what it began with is not kept: it cannot be trained from its start; "
            f"train a new run, or more epochs of this one (without --from-start, {record.epochs} are done)"
        )
    if record.began_step:
        raise RunUnknown(
            f"run {record.run} went on with an optimiser that had done {record.began_step} steps, which is kept with "
            "no run: it cannot be trained from its start; resume it without --from-start"
        )


def _best(storage: Storage, record: RunRecord, validations: tuple[ValidationReport, ...]) -> StageState | None:
    """Return the best model of these validations, if all of its stages are kept."""
    step, model = validations[-1].best_step if validations else None, BestModel(storage, ValidationKeys.of(record))
    if step is None:
        return None
    states = [model.load(stage, step) for stage in range(len(record.plan.stages))]
    found = [state for state in states if state is not None]
    return merge_stages(found) if len(found) == len(states) else None


def _reported_step(storage: Storage, record: RunRecord, index: CheckpointIndex) -> int:
    """Return the steps of which all replicas of the last stage have reported the losses.

    A worker's mark says so; if that is lost, its losses do. If there are neither, all of that is lost: they
    report a step before the stage is saved after it.
    """
    prefix, last = Keys.of(record).step_reports, len(record.plan.stages) - 1
    steps = [key.removeprefix(prefix).partition(".") for key in storage.list(prefix)]
    done = []
    for replica in range(record.plan.replicas):
        reported = [int(step) + 1 for step, _, worker in steps if worker == worker_name(last, replica)]
        marked = index.done.get((last, replica))
        done.append(max([*reported, *([] if marked is None else [marked])], default=None))
    if all(steps is None for steps in done):
        return index.common_steps(len(record.plan.stages))[0]
    return min(record.first_step if steps is None else steps for steps in done)


def _reported(
    storage: Storage, record: RunRecord, step: int
) -> tuple[tuple[float, ...], tuple[int, ...], dict[int, float]]:
    """Return the mean loss of each of the first `step` steps, of the replicas whose loss can be read, NaN if there is
    none; those of the steps that updated nothing; and the learning rates of this generation's steps.
    """
    keys, last = Keys.of(record), len(record.plan.stages) - 1
    losses, replicas = list(record.losses[: step - record.began_step]), record.plan.replicas
    skipped = [number for number in record.skipped_steps if number < step]
    reported = [load_reported(storage, keys, worker_name(last, replica)).reports for replica in range(replicas)]
    for number in range(record.began_step + len(losses), step):
        reports = [own[number] for own in reported if number in own]
        if len(reports) < replicas:
            _log.warning("run %s: the loss of step %d is that of %d replicas", keys.run, number, len(reports))
        samples = sum(report.samples for report in reports)
        losses.append(sum(report.loss_sum for report in reports) / samples if samples else math.nan)
        skipped += [number] if any(report.skipped for report in reports) else []
    rates = {
        number: rate for own in reported for number, report in own.items() if (rate := report.learning_rate) is not None
    }
    return tuple(losses), tuple(skipped), rates


def load_first_tensors(storage: Storage, record: RunRecord) -> dict[str, Tensor]:
    """Return the tensors of all stages that the run began with, by name. Raises RunUnknown."""
    keys, found = Keys.of(record), dict[str, Tensor]()
    for stage in range(len(record.plan.stages)):
        try:
            found |= codec.decode(storage.get(keys.parameters(stage)))
        except (CorruptMessage, KeyMissing) as error:
            raise RunUnknown(
                f"run {keys.run}: the parameters that were uploaded for stage {stage} cannot be read: {error}; "
                f"delete it (funcpipe run clean {keys.run}), and start a new one"
            ) from error
    return found
