"""The checks of a run that need no model: a command makes them before torch is loaded."""

from dataclasses import replace

from funcpipe.client.prepare.session import Session
from funcpipe.core import Plan, PlatformSpec, RunRecord, RunSettings
from funcpipe.core.settings import LAST
from funcpipe.core.stores import DEFAULT, KINDS, urls_by_kind
from funcpipe.errors import InvalidValue, PlanError, RunUnknown
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import planned_spec
from funcpipe.runstate.generations import newest_record, refuse_foreign_objects
from funcpipe.runstate.owner import last_run, refuse_if_owned


def check_stores(plan: Plan, url: str, prices: PlatformSpec) -> None:
    """Raise PlanError unless the storage at `url` keeps each kind where `plan` has it, and `prices` has the stores."""
    urls = urls_by_kind(url)
    missing = [kind for kind in KINDS if getattr(plan.stores, kind) != DEFAULT and kind not in urls]
    if missing:
        wanted = ",".join(["default=URL", *(f"{kind}=URL" for kind in missing)])
        where = ", ".join(f"{kind} in {getattr(plan.stores, kind)}" for kind in missing)
        raise PlanError(
            f"the plan has its {where}: give the URL of each store (--storage {wanted}), or plan with stores='default'"
        )
    for kind in KINDS:
        for other in KINDS:
            apart = getattr(plan.stores, kind) != getattr(plan.stores, other)
            if apart and urls.get(kind, urls[DEFAULT]) == urls.get(other, urls[DEFAULT]):
                raise PlanError(f"the plan has {kind} and {other} in different stores, but their URLs are the same")
    for name in plan.stores.names:
        if name not in prices.store_names:
            raise PlanError(
                f"the plan has objects in the store {name}, which {prices.name} has no prices for, to make the bill "
                f"with; name a specification that has it (--set platform.spec=FILE; in Python: "
                "RunSettings(prices=…)), or plan with stores='default'"
            )


def precheck(session: Session, plan: Plan, settings: RunSettings, spec: PlatformSpec | None = None) -> RunRecord | None:
    """The record of the run that is resumed, if one is; see `record_of`.

    Raises PlanError, InvalidValue, RunTaken, RunUnknown or StorageError for a run that no model can have.
    """
    check_sizes(plan, session.like)
    check_stores(plan, session.storage_url, settings.prices or spec or planned_spec(plan))
    name = settings.resume or settings.name
    if name is not None and not settings.take_over:
        refuse_if_owned(session.storage, name)
    return record_of(session.storage, settings)


def with_last(storage: Storage, settings: RunSettings) -> RunSettings:
    """`settings` with the name of the run to resume, if that is the last one. Raises RunUnknown if there is none."""
    return replace(settings, resume=last_run(storage)) if settings.resume == LAST else settings


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
