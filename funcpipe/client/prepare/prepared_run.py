"""All checks of a run are made here, once: before an object is written, a function starts or a module is changed."""

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from funcpipe.client.prepare.accelerated import check_accelerated
from funcpipe.client.prepare.earlier_run import (
    EarlierRun,
    as_begun,
    as_uploaded,
    earlier_account,
    earlier_run,
    take_over_for,
)
from funcpipe.client.prepare.frozen import JobBase
from funcpipe.client.prepare.job import Job, Learned, Learner, SampleOrder, make_job
from funcpipe.client.prepare.job_estimate import base_s, check_limits, estimate_job, within
from funcpipe.client.prepare.job_shape import collected_bytes, shape_left
from funcpipe.client.prepare.precheck import check_sizes, check_stores, precheck
from funcpipe.client.prepare.provisioned import choose_provisioned
from funcpipe.client.prepare.session import Session, prices_at
from funcpipe.client.prepare.stages import PreparedStage, RunData, make_stages
from funcpipe.core import (
    FaultTolerance,
    JobEstimate,
    Plan,
    PlatformSpec,
    RunAccount,
    RunLimits,
    RunRecord,
    RunSettings,
    Validation,
    ValidationReport,
)
from funcpipe.core.provisioned import Provisioned
from funcpipe.core.run_key import RunKey
from funcpipe.core.settings import DEFAULT_FAULTS, DEFAULT_SETTINGS, NO_LIMITS
from funcpipe.errors import InvalidValue
from funcpipe.platforms.base import OpenPlatform, Platform, RequestMeter, Storage
from funcpipe.platforms.catalog import open_platform
from funcpipe.runstate.base import load_base
from funcpipe.runstate.checkpoint_index import CheckpointPart
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.resume import ResumePoint
from funcpipe.training.averaging import SWA, check_decays
from funcpipe.training.data_source import Data
from funcpipe.training.recipe_trial import check_recipe
from funcpipe.training.sharding import without_model
from funcpipe.training.state import StageState, select_for_stage

_log = logging.getLogger(__name__)

Confirm = Callable[[JobEstimate | None], None]
"""A callback that gets the job's estimate before functions start; what it raises ends `train` or `start`."""


@dataclass(frozen=True, kw_only=True)
class SharedCode:
    """Code and data that trials of a sweep share, by their `keys`; `run_key` signs the objects of all these runs.

    `recipe` is how this run learns, as `dump_recipe` writes it.
    """

    keys: Keys
    run_key: RunKey
    recipe: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that can begin: all checks are made.

    `account` is what it has cost and taken so far. It goes on from `resumed`, if that is given. `running` is the record
    of a run that functions on `platform` are still training, or have trained to its end if `resumed` is given too: it
    is to be watched or collected, and nothing is to be started. A new run begins with what was `learned` before, if
    that is given. With `keeps_model` the model stays in the storage when the run has finished; where that is a
    deployment's, all that is kept `expires`. `meter` counts what this client asks of the storage. `estimate` is what
    the steps that are left are expected to take; None if the plan has none. At the end the client reads
    `collected_bytes`. Code and data that are `shared` with other runs lie in storage already. Functions that are
    started are kept ready as `provisioned` says, if it is given.
    """

    job: Job
    name: str
    platform: Platform
    storage: Storage
    storage_url: str
    stages: tuple[PreparedStage, ...]
    data: RunData
    faults: FaultTolerance
    limits: RunLimits
    account: RunAccount
    resumed: ResumePoint | None = None
    running: RunRecord | None = None
    learned: Learned | None = None
    keeps_model: bool = False
    expires: bool = False
    reopen: OpenPlatform = open_platform
    meter: RequestMeter = field(default_factory=RequestMeter)
    estimate: JobEstimate | None = None
    collected_bytes: float = 0.0
    shared: SharedCode | None = None
    provisioned: Provisioned | None = None

    @property
    def base(self) -> JobBase:
        """The tensors that no step changes."""
        return self.stages[0].base

    @property
    def opens_result(self) -> bool:
        """True if this client never holds what was learned: of a model by its weights, where it stays in storage."""
        return self.job.weights is not None and self.keeps_model

    @property
    def has_finished(self) -> bool:
        """True if all steps are done, so that the result is only to be collected."""
        return self.running is not None and self.resumed is not None

    @property
    def first_step(self) -> int:
        """The step that functions begin with that are to be started."""
        return self.began_step if self.resumed is None else self.resumed.step

    @property
    def began_step(self) -> int:
        """The step that the run has begun with, or begins with now."""
        if self.resumed is not None:
            return self.resumed.began_step
        return 0 if self.learned is None else self.learned.epochs * self.job.batches.steps_per_epoch

    def epochs_after(self, steps: int) -> int:
        """The number of epochs that the run has begun once it has done `steps` steps; it may have ended early."""
        began_step = self.began_step if self.running is None else self.running.began_step
        return math.ceil((began_step + steps) / self.job.batches.steps_per_epoch)

    def ask(self, confirm: Confirm | None) -> None:
        """Ask `confirm` before functions are started, if any are, with the estimate."""
        if confirm is not None and self.running is None:
            confirm(self.estimate)

    def state_of(self, stage: int) -> StageState | None:
        """The state of the stage of that number when the run was saved, if it was, or before it."""
        if self.resumed is None and self.learned is not None:
            return self.learned.state_of(self.stages[stage].module)
        if self.resumed is None or self.resumed.state is None:
            return None
        return select_for_stage(self.resumed.state, self.stages[stage].module)

    def parts_of(self, stage: int) -> Iterator[tuple[CheckpointPart | None, StageState]]:
        """Yield what functions of the stage of that number begin with, if it was saved: what is saved once for all of
        them, or the part of each replica that trains alone. Of more replicas than before, some begin with the same.
        """
        plan, known = self.job.plan, () if self.resumed is None else self.resumed.replicas
        if not known or not plan.trains_locally:
            state = self.state_of(stage)
            yield from () if state is None else [(None, state)]
            return
        for replica in range(plan.replicas):
            own = select_for_stage(known[replica % len(known)], self.stages[stage].module)
            part = CheckpointPart(replica, plan.replicas, model=replica == 0)
            yield part, own if part.model else without_model(own)

    @property
    def validations(self) -> tuple[ValidationReport, ...]:
        """The reports of validations of earlier generations."""
        return () if self.resumed is None else self.resumed.validations

    def best_of(self, stage: int) -> Iterator[tuple[int, StageState]]:
        """The steps of the best of these that are kept, and the stage of that number as it was then."""
        for step, model in ({} if self.resumed is None else self.resumed.best_models).items():
            yield step, select_for_stage(model, self.stages[stage].module)


def prepare_training(
    learner: Learner,
    dataset: Data,
    plan: Plan,
    order: SampleOrder,
    session: Session,
    validation: Validation | Data | None = None,
    *,
    faults: FaultTolerance,
    limits: RunLimits,
    settings: RunSettings,
    spec: PlatformSpec | None = None,
) -> PreparedRun:
    """Make the job of training `learner` by `plan`, and prepare it; raises ModelError and what `prepare` raises.

    Its prices are those of `spec`, by default of the plan's platform, in the region where it runs, unless `settings`
    have others.
    """
    if precheck(session, plan, settings, spec) is None:
        session.expect()
    job = make_job(learner, dataset, plan, order, settings, validation, spec=spec)
    validated = validation is not None or order.steps is not None  # a few steps that are compared need none
    return prepare(
        job,
        session,
        faults=faults,
        limits=limits,
        settings=settings,
        has_validation=validated,
        learned=learner.learned,
    )


def prepare(
    job: Job,
    session: Session,
    *,
    faults: FaultTolerance = DEFAULT_FAULTS,
    limits: RunLimits = NO_LIMITS,
    settings: RunSettings = DEFAULT_SETTINGS,
    has_validation: bool = False,
    learned: Learned | None = None,
) -> PreparedRun:
    """Check all that can be checked before `job` runs in `session`; `has_validation` says whether it is validated, and
    `learned` what a new run begins with.

    Raises PlanError, DataError, ModelError or PlatformRefused for a job that cannot run, RunUnknown for one that cannot
    be resumed, InvalidValue for a name that is taken, RunTaken for another client's run, StorageError without storage.
    """
    has_validation = has_validation or job.evaluation is not None
    done, state = (0, None) if learned is None else (learned.epochs * job.batches.steps_per_epoch, learned.state)
    check_learning(job, has_validation=has_validation, done=done, state=state)
    data = RunData.of(job)
    stages = make_stages(job, data)
    check_sizes(job.plan, session.like)
    check_stores(job.plan, session.storage_url, job.prices)
    record, before, job, stages = _earlier(job, stages, data, session, settings)
    if before.resumed is not None:
        done, state = before.resumed.step, before.resumed.state
        check_learning(job, has_validation=has_validation, done=done, state=state)
    if record is None and learned is not None:
        learned.check(stage.module for stage in stages)
    platform = before.platform or session.functions()
    job = replace(job, prices=prices_at(platform.url, job.prices, given=settings.prices is not None))
    account = RunAccount() if record is None else earlier_account(job, session.storage, record, before)
    if before.platform is None:
        job.check_on(platform, done)
        check_accelerated(job, stages, platform.spec)
    if before.platform is None or before.resumed is None:
        faults = within(platform.spec, faults, reading_s=base_s(job.plan, job.prices))
    done = done if before.resumed or not record else 0
    estimated = partial(_estimate, job, stages, platform.spec, faults, account, done=done)
    provisioned, estimate = None, estimated(job.prices)
    if settings.provisioned and before.platform is None:
        provisioned, estimate = choose_provisioned(job.plan, platform, job.prices, estimated)
    if before.platform is None and estimate is not None:
        check_limits(estimate, limits, elapsed_s=account.elapsed_s)
    return PreparedRun(
        job=job,
        name=settings.resume or settings.name or new_run_name(),
        platform=platform,
        storage=session.storage,
        storage_url=session.storage_url,
        stages=stages,
        data=data,
        faults=replace(faults, keep=faults.keep or session.lasts),
        limits=limits,
        account=account,
        resumed=before.resumed,
        running=record if before.platform is not None else None,
        learned=learned if record is None else None,
        keeps_model=session.lasts and settings.keep_model,
        expires=session.expires,
        reopen=session.reopen,
        meter=session.meter,
        estimate=estimate,
        collected_bytes=collected_bytes(job, stages),
        provisioned=provisioned,
    )


def _earlier(
    job: Job, stages: tuple[PreparedStage, ...], data: RunData, session: Session, settings: RunSettings
) -> tuple[RunRecord | None, EarlierRun, Job, tuple[PreparedStage, ...]]:
    """Return the record of the run that is to go on, if one is, and what it left; with the job and stages it has."""
    record = take_over_for(job, session, settings)
    if record is None:
        return None, EarlierRun(), job, stages
    begun, base = as_begun(job, record), load_base(session.storage, record)
    if begun is not job or base.stored or any(stage.module.fixed for stage in stages):
        job, stages = begun, make_stages(begun, data, base)
    opened = job.weights is not None and session.lasts and settings.keep_model
    before = earlier_run(job, session, record, stages, from_start=settings.from_start, opened=opened)
    if before.platform is None and settings.from_start:
        stages = as_uploaded(session.storage, record, stages)
    return record, before, job, stages


def _estimate(
    job: Job,
    stages: tuple[PreparedStage, ...],
    functions: PlatformSpec,
    faults: FaultTolerance,
    account: RunAccount,
    prices: PlatformSpec,
    *,
    done: int,
) -> JobEstimate | None:
    """The estimate of the steps after the first `done`, with all that the run has cost; None if the plan has none."""
    if job.plan.estimate is None or len(job.plan.estimate.stages) != len(job.plan.stages):
        return None
    shape = shape_left(job, stages, done=done, earlier_usd=account.spent_usd + account.requests_usd)
    return estimate_job(job.plan, shape, prices=prices, faults=faults, functions=functions)


def new_run_name() -> str:
    """A name that no other run has."""
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def check_learning(job: Job, *, has_validation: bool, done: int, state: StageState | None) -> None:
    """Raise InputError unless optimiser and schedule work, from `state` on, for what is left after `done` steps."""
    if not job.epochs:
        return
    check_recipe(
        job.recipe,
        job.trainable,
        steps=job.steps - done,
        epochs=job.epochs - done // job.batches.steps_per_epoch,
        has_validation=has_validation,
        resumed=state,
    )
    check_decays(job.recipe.teachers, done, job.steps)
    average = job.recipe.average
    if average is not None and not job.plan.averaged:
        _log.warning(
            "the plan leaves no room for the average of the parameters; plan with averaged (--set plan.averaged=true)"
        )
    if isinstance(average, SWA) and average.start_step > job.steps:
        raise InvalidValue("start_step", average.start_step, f"must be at most {job.steps}, the steps of the run")
