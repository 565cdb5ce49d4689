"""The checks of a run that need no model: a command makes them before torch is loaded."""

from funcpipe.client.prepare.plan_stores import check_stores
from funcpipe.client.prepare.session import Session
from funcpipe.core import Plan, PlatformSpec, RunRecord, RunSettings
from funcpipe.errors import InvalidValue, RunUnknown
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import planned_spec
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.owner import refuse_if_owned
from funcpipe.runstate.run_objects import refuse_foreign_objects


def precheck(session: Session, plan: Plan, settings: RunSettings, spec: PlatformSpec | None = None) -> RunRecord | None:
    """The record of the run that is gone on with, if one is; see `record_of`.

    Raises PlanError, InvalidValue, RunTaken, RunUnknown or StorageError for a run that no model can have.
    """
    check_sizes(plan, session.like)
    check_stores(plan, session.storage_url, settings.prices or spec or planned_spec(plan))
    name = settings.resume or settings.name
    if name is not None and not settings.take_over:
        refuse_if_owned(session.storage, name)
    return record_of(session.storage, settings)


def record_of(storage: Storage, settings: RunSettings) -> RunRecord | None:
    """The record of the run to resume. Without one, the name of the new run must not be taken, nor be a folder's."""
    if settings.resume is not None:
        return newest_record(storage, settings.resume)
    if settings.name is None:
        return None
    try:
        record = newest_record(storage, settings.name)
    except RunUnknown:
        refuse_foreign_objects(storage, settings.name)
        return None
    if settings.take_over:
        return record
    raise InvalidValue("run", settings.name, "is the name of a run in this storage; resume it, or clean it first")


def check_sizes(plan: Plan, like: PlatformSpec | None) -> None:
    """Raise PlanError for a plan with sizes that the platform imposed on local functions does not have."""
    if like is None:
        return
    from funcpipe.partitioner.cost.evaluate import size_of  # with numpy, which all else here does without

    for stage in plan.stages:
        size_of(stage.size, like)
