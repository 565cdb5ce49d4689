"""What if: faster links, more expensive functions, fewer sizes, or another model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from funcpipe.core import Estimate, ModelProfile, Plan, PlatformSpec, TrainingSpec
from funcpipe.errors import Infeasible, InvalidValue, PlanError
from funcpipe.partitioner.cost.evaluate import check_memory, evaluate
from funcpipe.partitioner.optimize import optimize


class Planner(Protocol):
    """Finds a plan for a profile, a platform and a training, as `optimize` does."""

    def __call__(self, profile: ModelProfile, spec: PlatformSpec, training: TrainingSpec, /) -> Plan:
        """The plan; raises Infeasible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """How another platform differs: bandwidth and prices by a factor, the rest by new values; None changes nothing.

    `price` multiplies the prices of functions, `request_price` those of requests to all stores, and of their bytes and
    hours; `latency_s` and `shared_bytes_s` are those of the default store.
    """

    bandwidth: float = 1.0
    price: float = 1.0
    request_price: float = 1.0
    latency_s: float | None = None
    contention: float | None = None
    shared_bytes_s: float | None = None
    sizes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth", "price", "request_price"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name == "bandwidth"):
                raise InvalidValue(name, value, "must be a factor above 0")

    def apply(self, spec: PlatformSpec) -> PlatformSpec:
        """The other platform. Raises InvalidValue for sizes that `spec` does not have."""
        names = (
            [size.name for size in spec.sizes] if self.sizes is None else [spec.size(name).name for name in self.sizes]
        )
        empty = spec.price_empty_get_usd  # None, or 0, stays
        given = {name: getattr(self, name) for name in ("latency_s", "contention", "shared_bytes_s")}
        return replace(
            spec,
            name=f"{spec.name}, changed",
            sizes=tuple(
                replace(
                    size,
                    upload_bytes_s=size.upload_bytes_s * self.bandwidth,
                    download_bytes_s=size.download_bytes_s * self.bandwidth,
                    price_usd_s=size.price_usd_s * self.price,
                )
                for size in spec.sizes
                if size.name in names
            ),
            price_put_usd=spec.price_put_usd * self.request_price,
            price_get_usd=spec.price_get_usd * self.request_price,
            price_empty_get_usd=empty and empty * self.request_price,
            stores=tuple(store.times(self.request_price) for store in spec.stores),
            **{name: value for name, value in given.items() if value is not None},
        )


def parse_changes(items: Sequence[str]) -> Changes:
    """Changes written as `bandwidth=2x`, `price=0.8x`, `request_price=2x`, `latency_s=0.01`, `contention=1.2`,
    `shared_bytes_s=1e9`, `sizes=1024MB,2048MB`. Raises InvalidValue.
    """
    values: dict[str, float | tuple[str, ...]] = {}
    known = Changes.__dataclass_fields__
    for item in items:
        name, _, text = item.partition("=")
        if name not in known or not text:
            raise InvalidValue("what-if", item, f"must be NAME=VALUE with one of {', '.join(known)}")
        factor = name in ("bandwidth", "price", "request_price")
        try:
            values[name] = (
                tuple(text.split(",")) if name == "sizes" else float(text.removesuffix("x") if factor else text)
            )
        except ValueError:
            raise InvalidValue(name, text, "must be a number") from None
    return Changes(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The best plan as things are, what that plan would take after the changes, and the best plan then.

    `now` is None where there is no plan as things are; `kept` is None where that plan cannot be kept, and `obstacle`
    says why.
    """

    FORMAT: ClassVar[str] = "funcpipe.what-if/1"

    now: Plan | None
    kept: Estimate | None
    obstacle: str | None
    best: Plan


def what_if(
    profile: ModelProfile,
    spec: PlatformSpec,
    training: TrainingSpec,
    changes: Changes,
    *,
    other_profile: ModelProfile | None = None,
    find: Planner = optimize,
) -> WhatIf:
    """Plan by `find` for `spec` as it is and with `changes`, the latter for `other_profile`, if one is given.

    Raises what `find` raises where there is no plan after the changes.
    """
    other_spec, other_profile = changes.apply(spec), other_profile or profile
    best = find(other_profile, other_spec, training)
    try:
        now = find(profile, spec, training)
    except Infeasible as error:
        return WhatIf(now=None, kept=None, obstacle=str(error), best=best)
    try:
        kept = evaluate(now, other_profile, other_spec)
        check_memory(now, kept)
    except PlanError as error:
        return WhatIf(now=now, kept=None, obstacle=str(error), best=best)
    return WhatIf(now=now, kept=kept, obstacle=None, best=best)
