"""All checks of a run are made here, once: before an object is written, a function starts or a module is changed."""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from funcpipe.client.earlier_run import EarlierRun, as_uploaded, earlier_run, take_over_for
from funcpipe.client.job import Job, Learner, SampleOrder, make_job
from funcpipe.client.session import Session
from funcpipe.client.stages import PreparedStage
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
from funcpipe.errors import PlanError
from funcpipe.model.graph import LayerGraph
from funcpipe.model.split import StageModule, dump_stage, split, stage_bounds
from funcpipe.partitioner.cost.evaluate import size_of
from funcpipe.platforms.base import OpenPlatform, Platform, Storage
from funcpipe.platforms.catalog import open_platform
from funcpipe.platforms.request_meter import RequestMeter
from funcpipe.runstate.owner import refuse_if_owned
from funcpipe.runstate.resume import ResumePoint
from funcpipe.runstate.spending import spent_so_far, spent_with_requests
from funcpipe.training.data import MapDataset
from funcpipe.training.sharding import check_sharding
from funcpipe.training.stage_job import StageJob
from funcpipe.training.state import StageState, select_for_stage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that can begin: all checks are made.

    `account` is what it has cost and taken so far. It goes on from `resumed`, if that is given. `running` is the record
    of a run that functions on `platform` are still training, or have trained to its end if `resumed` is given too: it
    is to be watched or collected, and nothing is to be started. `meter` counts what this client asks of the storage.
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
    reopen: OpenPlatform = open_platform
    meter: RequestMeter = field(default_factory=RequestMeter)

    @property
    def has_finished(self) -> bool:
        """Whether all steps are done, so that what the run has left is only to be collected."""
        return self.running is not None and self.resumed is not None

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
    name = settings.resume or settings.name
    if name is not None and not settings.take_over:
        refuse_if_owned(session.storage, name)
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
    cannot be resumed, InvalidValue for a name that is taken, RunTaken for a run that another client owns, and
    StorageError where the storage cannot be reached.
    """
    stages = _stages(job)
    _check_sizes(job.plan, session.like)
    record = take_over_for(job, session, settings)
    before, account = EarlierRun(), RunAccount()
    if record is not None:
        before = earlier_run(job, session, record, stages, from_start=settings.from_start)
        if before.platform is None and settings.from_start:
            stages = as_uploaded(session.storage, record, stages)
        account = _account(job, session.storage, record, before)
    platform = before.platform or session.functions()
    if before.platform is None:
        platform.check(job.plan, run_s=_expected_s(job, before.resumed))
    if before.platform is None or before.resumed is None:
        faults = _within(platform.spec, faults)
    return PreparedRun(
        job=job,
        name=settings.resume or settings.name or new_run_name(),
        platform=platform,
        storage=session.storage,
        storage_url=session.storage_url,
        stages=stages,
        faults=replace(faults, keep=faults.keep or session.lasts),
        limits=limits,
        account=account,
        resumed=before.resumed,
        running=record if before.platform is not None else None,
        reopen=session.reopen,
        meter=session.meter,
    )


def _account(job: Job, storage: Storage, record: RunRecord, before: EarlierRun) -> RunAccount:
    """What the run has cost and taken. Requests of a generation count in it once the next one goes on."""
    if before.platform is not None:
        return spent_so_far(storage, record)
    return spent_with_requests(storage, record, job.prices)


def _expected_s(job: Job, resumed: ResumePoint | None) -> float | None:
    """What the steps that are left are expected to take; None if the plan has no estimate."""
    estimate = job.plan.estimate
    if estimate is None:
        return None
    return (job.steps - (0 if resumed is None else resumed.step)) * (estimate.iteration_s + estimate.overhead_s)


def new_run_name() -> str:
    """A name that no other run has."""
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def _stages(job: Job) -> tuple[PreparedStage, ...]:
    """The stages of the job's plan, each with all that its functions need of the job."""
    _ = job.batches  # which raises DataError if the data is not enough
    bounds = stage_bounds(job.graph, job.plan)
    _check_order(job)
    routes = _routes(job.graph, stages_of_layers(bounds))
    if job.plan.is_sharded:
        if job.clip_grad_norm is not None:
            raise PlanError(
                "the plan divides the optimiser over replicas, each of which updates its split before the norm of "
                "the whole gradient is known; train without clip_grad_norm, or plan without shard_optimizer"
            )
        check_sharding(job.optimizer, routes, dict(job.graph.module.named_parameters()))
    return tuple(_prepared_stage(job, routes, stage) for stage in split(job.graph, bounds))


def _check_order(job: Job) -> None:
    """Raise PlanError if replicas would run micro-batches side by side of which each needs what the last one left."""
    names = job.graph.carried.names
    if names and job.plan.replicas > 1:
        raise PlanError(
            f"the plan has {job.plan.replicas} replicas, but each forward of {job.graph.name} leaves "
            f"{', '.join(names)} for the next one, so that micro-batches must follow each other; "
            "plan with replicas=(1,)"
        )


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
