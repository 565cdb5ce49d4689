"""The prices and limits of a platform in each of its regions, as dated data, and its specification in one of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from funcpipe.core import checks
from funcpipe.core.platform import BANDWIDTH, PRICED, STORES, PlatformSpec
from funcpipe.errors import InvalidValue

_FIELDS = {
    "functions": ("price_gb_s_usd",),
    "invocations": ("price_invocation_usd",),
    "requests": ("price_put_usd", "price_get_usd"),
    "traffic": ("price_traffic_usd_gb",),
    BANDWIDTH: ("shared_bytes_s",),
}
"""The fields of each group, which are used together or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPrices:
    """The known values of one region; None where a value is not known.

    `price_gb_s_usd` is the price of a function for each GB (2^30 bytes) of its memory and second, by the name of the
    specification. The other fields are those of `PlatformSpec`. `sources` names the source of each in the table.
    """

    region: str
    price_gb_s_usd: Mapping[str, float] = field(default_factory=dict, hash=False)
    price_invocation_usd: float | None = None
    price_put_usd: float | None = None
    price_get_usd: float | None = None
    price_traffic_usd_gb: float | None = None
    shared_bytes_s: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        known = {name for names in _FIELDS.values() for name in names if getattr(self, name) not in (None, {})}
        for name in known ^ self.sources.keys():
            raise InvalidValue(f"sources of {self.region}", name, "must have an entry for each value, and no other")

    def values(self, group: str, platform: str) -> Mapping[str, float]:
        """Return the fields of a group for the specification `platform`; none unless all are known."""
        found = {name: getattr(self, name) for name in _FIELDS[group]}
        found = {name: value.get(platform) if isinstance(value, Mapping) else value for name, value in found.items()}
        return {} if None in found.values() else found


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionTable:
    """The regions of some platforms. `sources` has where and when values were published, by a short name."""

    FORMAT: ClassVar[str] = "funcpipe.regions/1"

    platforms: tuple[str, ...]
    regions: tuple[RegionPrices, ...]
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        checks.distinct("regions", [row.region for row in self.regions])
        for row in self.regions:
            for name in row.sources.values():
                if name not in self.sources:
                    raise InvalidValue(f"sources of {row.region}", name, "must be among the sources of the table")

    def of(self, region: str) -> RegionPrices:
        """Return the known values of `region`, which may be none."""
        return next((row for row in self.regions if row.region == region), RegionPrices(region=region))


def in_region(spec: PlatformSpec, region: str, table: RegionTable | None = None) -> PlatformSpec:
    """Return `spec` with the values of `region` in `table`; all others stay those of its own region, as `borrowed`.

    Without a table nothing is known of other regions.
    """
    if region == spec.region:
        return spec
    row = RegionPrices(region=region) if table is None else table.of(region)
    found = {group: row.values(group, spec.name) for group in _FIELDS}
    needed = [*PRICED, *([BANDWIDTH] if spec.shared_bytes_s is not None else [])]
    needed += [STORES] if any(store.has_price for store in spec.stores) else []
    borrowed = {group: spec.borrowed.get(group, spec.region) for group in needed if not found.get(group)}
    changed: dict[str, Any] = {name: value for values in found.values() for name, value in values.items()}
    sources = {name: f"{region}: {table.sources[row.sources[name]]}" for name in changed if table is not None}
    price_gb_s_usd = changed.pop("price_gb_s_usd", None)
    if price_gb_s_usd is not None:
        changed["sizes"] = tuple(
            replace(size, price_usd_s=price_gb_s_usd * size.memory_mb / 1024) for size in spec.sizes
        )
        sources["price_usd_s"] = sources.pop("price_gb_s_usd")
    return replace(spec, region=region, borrowed=borrowed, sources={**spec.sources, **sources}, **changed)
