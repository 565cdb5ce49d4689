"""The point where a run can be resumed, under the same or another plan: the newest step that all its stages have saved.

Any object may be damaged or gone by then. A checkpoint that cannot be read costs the steps since the one before it; a
loss that can be read nowhere is unknown; and what the run has cost is what the rest of its documents say.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from funcpipe.comm import codec
from funcpipe.core import FinishedRun, Plan, RunRecord, ValidationReport, worker_name
from funcpipe.core.texts import counted
from funcpipe.errors import CorruptMessage, KeyMissing, PlanError, RunUnknown
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoints import read_all
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.reader import RunReader
from funcpipe.training.state import OWN, StageState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The state of the whole model after `step` steps, the loss of each, and which of them updated nothing.

    `state` is None if nothing was saved, so that training starts from the beginning. Where replicas train alone, it is
    that of the first of `replicas`, which are there only if the run is to go on (`with_replicas`). The losses are those
    of the steps from `began_step` on, where the run has begun. `validations` are those before `step`, and
    `best_models` those of the best of them that were kept. With `stopped`, the run has ended early there, after the
    last of them. `learning_rates` are those of the newest generation's steps, as far as they were reported.
    """

    keys: Keys
    step: int
    state: StageState | None
    losses: tuple[float, ...]
    began_step: int = 0
    skipped_steps: tuple[int, ...] = ()
    learning_rates: Mapping[int, float] = field(default_factory=dict)
    validations: tuple[ValidationReport, ...] = ()
    best_models: Mapping[int, StageState] = field(default_factory=dict)
    stopped: bool = False
    replicas: tuple[StageState, ...] = ()


def load_resume_point(
    storage: Storage, record: RunRecord, *, from_start: bool = False, opened: bool = False
) -> ResumePoint:
    """Return the newest point at which the run can be resumed, with its state; with `from_start`, its beginning.

    States that are `opened` are read once, a file at a time, and again when they are asked for.
    Raises RunUnknown if all that the run has saved is damaged, or if its beginning is not kept.
    """
    reader = RunReader(storage, record)
    keys, finished, ended = reader.keys, reader.finished, reader.ended_step
    if from_start:
        _check_has_start(record, finished)
        return ResumePoint(keys=keys, step=0, state=None, losses=())
    reported = _reported_step(reader) if ended is None else ended
    damaged = []
    for step in reader.saved:
        if step > reported:
            continue
        try:
            state = reader.model(step, opened=opened)
            read_all(state)
        except (CorruptMessage, KeyMissing) as error:
            _log.warning("run %s: the checkpoint after step %d cannot be read: %s", keys.run, step, error)
            damaged.append(str(error))
            continue
        if step < reported:
            again = counted(reported - step, "step")
            _log.warning("run %s: goes on after step %d, and repeats %s", keys.run, step, again)
        history = reader.history(step)
        stopped = any(report.stop and report.step == step for report in reader.validations)
        own = (report for report in reader.validations if report.step < step or (stopped and report.step == step))
        validations = (*record.validations, *own)
        return ResumePoint(
            keys=keys,
            step=step,
            state=state,
            losses=history.losses,
            began_step=record.began_step,
            skipped_steps=history.skipped_steps,
            learning_rates=history.learning_rates,
            validations=validations,
            best_models=reader.best_models(validations, opened=opened),
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


def with_replicas(resumed: ResumePoint, storage: Storage, record: RunRecord, plan: Plan) -> ResumePoint:
    """Return `resumed`, to go on under `plan`, with the states of replicas that have trained alone.

    Raises PlanError in the middle of a round, unless `plan` has the same replicas and stages; RunUnknown if a state is
    damaged.
    """
    before = record.plan
    if resumed.state is None or not before.trains_locally:
        return resumed
    in_round = any(name.startswith(OWN) for name in resumed.state.tensors)
    if in_round and _rounds_of(plan) != _rounds_of(before):
        raise PlanError(
            f"run {record.run} has ended after step {resumed.step}, in the middle of a round of sync_every="
            f"{before.sync_every}, where each of its {before.replicas} replicas has other parameters; resume it with "
            "the stages, replicas, sync_every, sync_fragments, sync_delay and shard_optimizer that it was started "
            "with, and with others once all rounds have ended, or with --from-start"
        )
    try:
        return replace(resumed, replicas=RunReader(storage, record).models_of_replicas(resumed.step, before.replicas))
    except (CorruptMessage, KeyMissing) as error:
        raise RunUnknown(
            f"run {record.run}: what a replica has saved after step {resumed.step} cannot be read: {error}; resume it "
            "with --from-start (in Python: from_start=True)"
        ) from error


def _rounds_of(plan: Plan) -> tuple[object, ...]:
    """Return what must stay the same in the middle of a round."""
    meets = plan.sync_every, plan.sync_fragments, plan.sync_delay
    return plan.replicas, *meets, plan.is_sharded, *((stage.first, stage.stop) for stage in plan.stages)


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


def _reported_step(reader: RunReader) -> int:
    """Return the steps of which all replicas of the last stage have reported the losses.

    A worker's mark says so; if that is lost, its losses do. If there are neither, all of that is lost: they
    report a step before the stage is saved after it.
    """
    record, index = reader.record, reader.index
    prefix, last = reader.keys.step_reports, len(record.plan.stages) - 1
    steps = [key.removeprefix(prefix).partition(".") for key in reader.storage.list(prefix)]
    done = []
    for replica in range(record.plan.replicas):
        reported = [int(step) + 1 for step, _, worker in steps if worker == worker_name(last, replica)]
        marked = index.done.get((last, replica))
        done.append(max([*reported, *([] if marked is None else [marked])], default=None))
    if all(steps is None for steps in done):
        return index.common_steps(len(record.plan.stages))[0]
    return min(record.first_step if steps is None else steps for steps in done)


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
