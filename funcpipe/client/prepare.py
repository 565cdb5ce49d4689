"""All checks of a run are made here, once: before an object is written, a function starts or a module is changed."""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from funcpipe.client.job import Job, Learner, SampleOrder, make_job
from funcpipe.client.session import Session
from funcpipe.core import (
    FaultTolerance,
    Plan,
    PlatformSpec,
    Routes,
    RunAccount,
    RunLimits,
    RunRecord,
    RunSettings,
    TensorProfile,
    TiedParameter,
    find_routes,
    stages_of_layers,
)
from funcpipe.core.settings import DEFAULT_FAULTS, DEFAULT_SETTINGS, NO_LIMITS
from funcpipe.errors import InvalidValue, PlanError, PlatformError, RunUnknown
from funcpipe.model.graph import LayerGraph
from funcpipe.model.split import StageModule, dump_stage, split, stage_bounds
from funcpipe.partitioner.cost.evaluate import size_of
from funcpipe.platforms.base import Platform, State, Storage
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.resume import ResumePoint, load_resume_point, read_heartbeats
from funcpipe.training.data import MapDataset
from funcpipe.training.sharding import check_sharding
from funcpipe.training.stage_job import StageJob
from funcpipe.training.state import StageState, select_for_stage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedStage:
    """A stage that can be sent: the module, its code as bytes, and its tensors by name."""

    module: StageModule
    bundle: bytes
    tensors: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that can begin: all checks are made.

    `account` is what it has cost and taken so far. It goes on from `resumed`, if that is given. `running` is the record
    of a run that functions on `platform` are still training: it is to be watched, and nothing is to be started.
    """

    job: Job
    name: str
    platform: Platform
    storage: Storage
    storage_url: str
    stages: tuple[PreparedStage, ...]
    faults: FaultTolerance
    limits: RunLimits
    account: RunAccount
    resumed: ResumePoint | None = None
    running: RunRecord | None = None

    def state_of(self, stage: int) -> StageState | None:
        """What the stage of that number had learned when the run was saved, if it was."""
        if self.resumed is None or self.resumed.state is None:
            return None
        return select_for_stage(self.resumed.state, self.stages[stage].module)


def prepare_training(
    learner: Learner,
    dataset: MapDataset | Callable[[], MapDataset],
    plan: Plan,
    order: SampleOrder,
    session: Session,
    *,
    faults: FaultTolerance,
    limits: RunLimits,
    settings: RunSettings,
) -> PreparedRun:
    """Make the job of training `learner` by `plan`, and prepare it; raises ModelError and what `prepare` raises."""
    job = make_job(learner, dataset, plan, order, settings)
    return prepare(job, session, faults=faults, limits=limits, settings=settings)


def prepare(
    job: Job,
    session: Session,
    *,
    faults: FaultTolerance = DEFAULT_FAULTS,
    limits: RunLimits = NO_LIMITS,
    settings: RunSettings = DEFAULT_SETTINGS,
) -> PreparedRun:
    """Check all that can be checked before `job` runs in `session`.

    Raises PlanError, DataError, ModelError or PlatformRefused for a job that cannot run, RunUnknown for a run that
    cannot be resumed, InvalidValue for a name that is taken, and StorageError where the storage cannot be reached.
    """
    stages = _stages(job)
    _check_sizes(job.plan, session.like)
    record = _record_of(session.storage, settings)
    if record is not None:
        _check_same_job(job, record)
    running = None if record is None else _running_on(session, record)
    resumed = None
    if record is not None and running is not None:
        _check_same_plan(job.plan, record)
    elif record is not None:
        resumed = _resumed(session.storage, record, stages)
    platform = running or session.functions()
    if running is None:
        platform.check(job.plan)
    return PreparedRun(
        job=job,
        name=settings.resume or settings.name or new_run_name(),
        platform=platform,
        storage=session.storage,
        storage_url=session.storage_url,
        stages=stages,
        faults=_within(platform.spec, replace(faults, keep=faults.keep or session.lasts)),
        limits=limits,
        account=_spent(session.storage, record),
        resumed=resumed,
        running=record if running is not None else None,
    )


def new_run_name() -> str:
    """A name that no other run has."""
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def _stages(job: Job) -> tuple[PreparedStage, ...]:
    """The stages of the job's plan, each with all that its functions need of the job."""
    _ = job.batches  # which raises DataError if the data is not enough
    bounds = stage_bounds(job.graph, job.plan)
    routes = _routes(job.graph, stages_of_layers(bounds))
    if job.plan.is_sharded:
        if job.clip_grad_norm is not None:
            raise PlanError(
                "the plan divides the optimiser over replicas, each of which updates its split before the norm of "
                "the whole gradient is known; train without clip_grad_norm, or plan without shard_optimizer"
            )
        check_sharding(job.optimizer, routes)
    return tuple(_prepared_stage(job, routes, stage) for stage in split(job.graph, bounds))


def _prepared_stage(job: Job, routes: Routes, stage: StageModule) -> PreparedStage:
    reads_data = bool(stage.inputs) or stage.is_last
    stage_job = StageJob(
        routes=routes,
        signature=job.graph.signature,
        loss=job.loss,
        optimizer=job.optimizer,
        dataset=job.dataset if reads_data else None,
        samples=job.samples,
        shuffle=job.shuffle,
        clip_grad_norm=job.clip_grad_norm,
    )
    bundle, tensors = dump_stage(stage, stage_job)
    return PreparedStage(module=stage, bundle=bundle, tensors=tensors)


def _record_of(storage: Storage, settings: RunSettings) -> RunRecord | None:
    """The record of the run to resume. Without one, the name of the new run must not be taken."""
    if settings.resume is not None:
        return newest_record(storage, settings.resume)
    if settings.name is not None:
        try:
            newest_record(storage, settings.name)
        except RunUnknown:
            return None
        raise InvalidValue("run", settings.name, "is the name of a run in this storage; resume it, or clean it first")
    return None


def _check_same_job(job: Job, record: RunRecord) -> None:
    """Raise PlanError unless the steps that the run has done are steps of `job`."""
    for name, before, now in (
        ("global_batch", record.plan.global_batch, job.plan.global_batch),
        ("samples", record.samples, job.samples),
        ("seed", record.seed, job.seed),
        ("shuffle", record.shuffle, job.shuffle),
        ("clip_grad_norm", record.clip_grad_norm, job.clip_grad_norm),
    ):
        if before != now:
            raise PlanError(f"run {record.run} has {name} {before}, not {now}; resume it with what it was started with")


def _running_on(session: Session, record: RunRecord) -> Platform | None:
    """The platform on which functions of the run still run, if any do."""
    try:
        platform = session.reopen(record.platform)
        found = list_functions(session.storage, Keys(record.run, record.generation))
        alive = any(platform.status(function.handle).state is State.RUNNING for function in found)
    except PlatformError as error:
        _log.info("run %s: no function of it runs any more: %s", record.run, error)
        return None
    return platform if alive else None


def _check_same_plan(plan: Plan, record: RunRecord) -> None:
    """Raise PlanError unless a run that still runs does so by `plan`."""
    if replace(record.plan, estimate=None, solver=None) != replace(plan, estimate=None, solver=None):
        raise PlanError(f"run {record.run} still runs by another plan; end it first: funcpipe stop {record.run}")


def _resumed(storage: Storage, record: RunRecord, stages: Sequence[PreparedStage]) -> ResumePoint:
    """The newest step that all stages of the run have saved; raises PlanError if they are of another model."""
    resumed = load_resume_point(storage, record)
    if resumed.state is not None:
        for stage in stages:
            select_for_stage(resumed.state, stage.module)
    _log.info("run %s: resumes after step %d of generation %d", record.run, resumed.step, record.generation)
    return resumed


def _spent(storage: Storage, record: RunRecord | None) -> RunAccount:
    """What the run has cost and taken so far, by its record and by what its functions said last."""
    if record is None:
        return RunAccount()
    beats = [beat for beat in read_heartbeats(storage, record) if beat is not None]
    return RunAccount(
        spent_usd=max([record.spent_usd, *(beat.run_usd for beat in beats)]),
        elapsed_s=max([record.elapsed_s, *(beat.run_s for beat in beats)]),
    )


def _check_sizes(plan: Plan, like: PlatformSpec | None) -> None:
    """Raise PlanError for a plan with sizes that the platform imposed on local functions does not have."""
    if like is not None:
        for stage in plan.stages:
            size_of(stage.size, like)


def _within(spec: PlatformSpec, faults: FaultTolerance) -> FaultTolerance:
    """`faults` within the limits of the platform."""
    lifetime_s = min([s for s in (faults.lifetime_s, spec.lifetime_s) if s is not None], default=None)
    return replace(faults, lifetime_s=lifetime_s, cold_start_s=max(faults.cold_start_s, spec.cold_start_s))


def _routes(graph: LayerGraph, stage_of_layer: Sequence[int]) -> Routes:
    tensors = [
        TensorProfile(
            name=value.name,
            producer=value.producer,
            consumers=value.consumers,
            forward_bytes=value.bytes,
            backward_bytes=value.bytes if value.differentiable else 0,
        )
        for value in graph.values
    ]
    ties = [TiedParameter(name=tie.names[0], layers=tie.layers, parameter_bytes=tie.bytes) for tie in graph.ties]
    return find_routes(stage_of_layer, tensors, ties)
