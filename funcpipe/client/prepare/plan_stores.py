"""A check that a run's storage has all stores of its plan, each with a URL and known prices."""

from funcpipe.core import Plan, PlatformSpec
from funcpipe.core.stores import DEFAULT, KINDS, urls_by_kind
from funcpipe.errors import PlanError


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
                f"with; name a specification that has it (--spec FILE; in Python: RunSettings(prices=…)), or plan with "
                "stores='default'"
            )
