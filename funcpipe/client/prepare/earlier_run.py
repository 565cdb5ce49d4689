"""The run that a job goes on with: found, compared with the job, taken over from another client, read."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from funcpipe.client.control.stopping import take_over
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.precheck import record_of
from funcpipe.client.prepare.session import Session
from funcpipe.client.prepare.stages import PreparedStage
from funcpipe.core import Plan, RunAccount, RunRecord, RunSettings, ShardOrder
from funcpipe.errors import PlanError, PlatformError
from funcpipe.model.split.bundle import CONSTANT
from funcpipe.platforms.base import Platform, State, Storage
from funcpipe.runstate.finished import find_finished
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.liveness import all_finished
from funcpipe.runstate.reader import spent_so_far, spent_with_requests
from funcpipe.runstate.resume import ResumePoint, load_first_tensors, load_resume_point, with_replicas
from funcpipe.training.state import select_for_stage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """The run that a job goes on with: on `platform`, whose functions still run, or from where it is `resumed`.

    It has both if it has finished: functions of `platform` have done all its steps, up to where it would be resumed.
    """

    platform: Platform | None = None
    resumed: ResumePoint | None = None


def take_over_for(job: Job, session: Session, settings: RunSettings) -> RunRecord | None:
    """The record of the run that `job` goes on with, which is ended first if that is wanted."""
    record, name = record_of(session.storage, settings), settings.resume or settings.name
    if record is not None:
        _check_same_job(job, record)
    if settings.take_over and name is not None:
        take_over(session.storage, name, session.reopen)
        record = record_of(session.storage, settings)
    if record is not None:
        _check_same_job(job, record)
    return record


def _check_same_job(job: Job, record: RunRecord) -> None:
    for name, before, now in (
        ("global_batch", record.plan.global_batch, job.plan.global_batch),
        ("samples", record.samples, job.samples),
        ("seed", record.seed, job.seed),
        ("shuffle", record.shuffle, job.shuffle),
        ("drop_last", record.drop_last, job.drop_last),
        ("clip_grad_norm", record.clip_grad_norm, job.recipe.clip_grad_norm),
        ("clip_grad_value", record.clip_grad_value, job.recipe.clip_grad_value),
        ("scheduler", record.lr_schedule, job.recipe.lr_schedule),
        ("average", record.average, job.recipe.averaged_by),
        ("teachers", record.teachers, job.recipe.taught_by),
        ("losses over", record.loss_over or "samples", job.recipe.loss_over or "samples"),
        ("precision", record.precision.value, job.recipe.precision.value),
    ):
        if before != now:
            raise PlanError(f"run {record.run} has {name} {before}, not {now}; resume it with what it was started with")


def as_begun(job: Job, record: RunRecord) -> Job:
    """`job`, which deals out samples that lie in shards as the run of `record` has begun to.

    Raises PlanError if they lie in other shards now.
    """
    before, now = record.shard_order, job.shards
    if now is None and before is None:
        return job
    if now is None or before is None or now.order.digest != before.digest:
        raise PlanError(
            f"run {record.run} has begun with samples that {_lie(before)}, and the data's now "
            f"{_lie(None if now is None else now.order)}; resume it with the data that it was started with"
        )
    return job if now.order == before else replace(job, shards=replace(now, order=before))


def _lie(order: ShardOrder | None) -> str:
    return "lie in no shards" if order is None else f"lie in shards (of sizes {order.digest})"


def earlier_run(
    job: Job, session: Session, record: RunRecord, stages: Sequence[PreparedStage], *, from_start: bool, opened: bool
) -> EarlierRun:
    """The way `job` goes on with the run of `record`: by watching it, by collecting it, or by resuming it, from states
    that are in memory or only `opened`.

    Raises PlanError if it still runs by another plan, or is of another model.
    """
    finished = find_finished(session.storage, Keys.of(record)) is not None
    platform = None if finished else _running_on(session, record)
    if platform is not None:
        if not _has_same_plan(job.plan, record):
            raise PlanError(
                f"run {record.run} still runs by another plan; end it first: funcpipe run stop {record.run}"
            )
        return EarlierRun(platform=platform)
    resumed = load_resume_point(session.storage, record, from_start=from_start, opened=opened)
    if resumed.state is not None:
        for stage in stages:
            select_for_stage(resumed.state, stage.module)
    is_whole = record.steps == job.steps and (resumed.stopped or resumed.step == job.steps)
    is_whole = is_whole and _has_same_plan(job.plan, record)
    if resumed.step > job.steps:
        raise PlanError(
            f"run {record.run} has done {resumed.step} steps already, and {job.epochs} epochs are {job.steps}; epochs "
            f"count from the beginning of the run, which was started for {record.epochs}: ask for more of them"
        )
    if not is_whole or not (finished or all_finished(session.storage, record)):
        _log.info("run %s: resumes after step %d of generation %d", record.run, resumed.step, record.generation)
        return EarlierRun(resumed=with_replicas(resumed, session.storage, record, job.plan))
    _log.info("run %s: has finished, and is collected as it is", record.run)
    return EarlierRun(platform=_last_platform(session, record), resumed=resumed)


def _running_on(session: Session, record: RunRecord) -> Platform | None:
    """The platform on which functions of the run still run, if any do."""
    try:
        platform = _reopened(session, record)
        found = list_functions(session.storage, Keys.of(record))
        alive = any(platform.status(function.handle).state is State.RUNNING for function in found)
    except PlatformError as error:
        _log.info("run %s: no function of it runs any more: %s", record.run, error)
        return None
    return platform if alive else None


def _last_platform(session: Session, record: RunRecord) -> Platform:
    """The platform of a finished run's functions; that of new ones, if it is gone."""
    try:
        return _reopened(session, record)
    except PlatformError:
        return session.functions()


def _reopened(session: Session, record: RunRecord) -> Platform:
    """The platform of the run, asked for its specification: a local host may end as soon as its functions have.

    Raises PlatformError if it is gone.
    """
    platform = session.reopen(record.platform)
    _log.debug("run %s: ran on platform %s", record.run, platform.spec.name)
    return platform


def _has_same_plan(plan: Plan, record: RunRecord) -> bool:
    return replace(record.plan, estimate=None, solver=None) == replace(plan, estimate=None, solver=None)


def as_uploaded(storage: Storage, record: RunRecord, stages: Sequence[PreparedStage]) -> tuple[PreparedStage, ...]:
    """`stages` with the parameters and buffers that the run began with; raises PlanError if the model is another."""
    found = load_first_tensors(storage, record)
    first = {name: tensor for name, tensor in found.items() if not name.startswith(CONSTANT)}  # those are by stage
    for stage in stages:
        for name, tensor in stage.tensors.items():
            if name in first and (first[name].shape, first[name].dtype) != (tensor.shape, tensor.dtype):
                raise PlanError(f"run {record.run} has begun with another model: {name!r} has another shape there")
    return tuple(
        replace(stage, tensors={name: first.get(name, tensor) for name, tensor in stage.tensors.items()})
        for stage in stages
    )


def earlier_account(job: Job, storage: Storage, record: RunRecord, before: EarlierRun) -> RunAccount:
    """The cost and the time of the run so far. Requests of a generation count in it once the next one goes on."""
    finished = find_finished(storage, Keys.of(record))
    if finished is not None:
        return RunAccount(spent_usd=finished.bill.cost_usd, elapsed_s=finished.elapsed_s)
    if before.platform is not None:
        return spent_so_far(storage, record)
    return spent_with_requests(storage, record, job.prices)
