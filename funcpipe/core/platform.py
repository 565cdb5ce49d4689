"""The offer of a platform: function sizes, links, prices and limits, in each of its regions, as dated data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from funcpipe.core import checks
from funcpipe.core.accelerator import Accelerator
from funcpipe.core.choices import SYNC_WIRES
from funcpipe.core.json_form import IF_CHANGED
from funcpipe.core.provisioned import ProvisionedTerms
from funcpipe.core.stores import AUTO, DEFAULT, DEFAULT_STORES, GB, KINDS, CountsByKind, Stores, StoreSpec, StoreTerms
from funcpipe.errors import InvalidValue

MB = 1024 * 1024  # of function memory, as the platforms count it


_NOT_NEGATIVE = ("price_invocation_usd", "price_traffic_usd_gb", "cold_start_s")
_POSITIVE = ("lifetime_s", "shared_cores", "base_memory_bytes", "launches_10s")

LIST_KEYS = 1000
"""The largest number of keys that one listing returns, as in S3 and OSS."""

PRICED = ("functions", "invocations", "requests", "traffic")
"""The groups of values that a region has prices of."""

BANDWIDTH = "bandwidth"
"""The further limit of a region: `shared_bytes_s`."""

STORES = "stores"
"""Further stores, whose prices are known in the region of a shipped specification only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSize:
    """One size of function on offer: memory (1 MB = 2^20 bytes), virtual processors, link, price, cold start.

    A function with an `accelerator`, of which it has one or a part, computes on it: the price is for both, and
    `memory_mb` is that of the host.
    """

    name: str
    memory_mb: int
    vcpu: float
    upload_bytes_s: float
    download_bytes_s: float
    price_usd_s: float
    cold_start_s: float | None = None
    accelerator: Accelerator | None = field(default=None, metadata=IF_CHANGED)

    def __post_init__(self) -> None:
        checks.at_least("memory_mb", self.memory_mb, 1)
        for name in ("vcpu", "upload_bytes_s", "download_bytes_s"):
            checks.positive(name, getattr(self, name))
        checks.at_least("price_usd_s", self.price_usd_s, 0)
        if self.cold_start_s is not None:
            checks.at_least("cold_start_s", self.cold_start_s, 0)
        if self.accelerator is not None:
            for name in ("fp32_tflop_s", "memory_gb_s", "host_device_gb_s"):
                checks.positive(f"accelerator.{name}", getattr(self.accelerator, name) or 0)

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes."""
        return self.memory_mb * MB


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """Seconds of one processor to round a GB (2^30 bytes) of 32-bit numbers for a message, and to read and add it."""

    encode_s_gb: float
    decode_s_gb: float

    def __post_init__(self) -> None:
        checks.all_at_least(self, 0, "encode_s_gb", "decode_s_gb")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformSpec(StoreTerms):
    """A platform in one region: sizes in ascending order of memory, and what holds for all of them.

    Every storage operation takes `latency_s` before its bytes move. `contention` (at least 1) is how much
    slower a function computes while it transfers. `shared_bytes_s` caps the traffic of all functions together, and
    `shared_cores` the processors that they compute on, where functions share one machine; None means no such cap.

    A cold start lasts from the invocation to the first task, torch is loaded by then; `cold_start_s` is that of the
    slowest size, which hand-overs and restarts reckon with.

    A GB that leaves the region costs `price_traffic_usd_gb`, free allowances aside, as what a client downloads does.

    What is not known of the region is `borrowed`: it maps groups such as "functions" and "traffic" to the region that
    their values belong to.

    `base_memory_bytes`, where it was measured, is what a function needs before it holds any of a model.

    Latency, prices of requests and `shared_bytes_s` are those of its default store, and so are `puts_s`, `gets_s`,
    `requests_s` and `largest_bytes`, as `StoreSpec` has them; `stores` are further ones. `shared_bytes_s` has no
    default here: a specification states that there is no such limit.

    Sums of gradients in a number format cost processors what `codecs` has by its name; in others they cost nothing.

    In each 10 seconds `launches_10s` functions of a size may start, all of them at once if none has before; None means
    no such limit.

    Functions that the platform keeps ready for a run cost what `provisioned` says; None means that it offers none.

    Sizes of the same memory may differ in their processors. `sources` maps a field of this class, or of the
    sizes, to where and when its values were published or measured.
    """

    FORMAT: ClassVar[str] = "funcpipe.platform/1"

    name: str
    region: str
    as_of: str
    source: str
    sizes: tuple[FunctionSize, ...]
    contention: float
    shared_bytes_s: float | None
    price_invocation_usd: float
    lifetime_s: float | None
    cold_start_s: float
    max_functions: int
    max_payload_bytes: int
    shared_cores: int | None = None
    base_memory_bytes: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    stores: tuple[StoreSpec, ...] = ()
    price_traffic_usd_gb: float = 0.0
    borrowed: Mapping[str, str] = field(default_factory=dict, hash=False)
    launches_10s: int | None = None
    codecs: Mapping[str, CodecCost] = field(default_factory=dict, hash=False, metadata=IF_CHANGED)
    provisioned: ProvisionedTerms | None = field(default=None, metadata=IF_CHANGED)

    def __post_init__(self) -> None:
        StoreTerms.__post_init__(self)
        checks.filled("sizes", self.sizes)
        checks.distinct("stores", [DEFAULT, AUTO, *(store.name for store in self.stores)])
        checks.distinct("sizes", [size.name for size in self.sizes])
        memory = [size.memory_mb for size in self.sizes]
        if memory != sorted(memory):
            raise InvalidValue("sizes", memory, "must be in ascending order of memory_mb")
        for name in _NOT_NEGATIVE:
            checks.at_least(name, getattr(self, name), 0)
        for name in ("contention", "max_functions", "max_payload_bytes"):
            checks.at_least(name, getattr(self, name), 1)
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                checks.positive(name, getattr(self, name))
        known = {item.name for kind in (PlatformSpec, FunctionSize) for item in fields(kind)}
        _check_keys("codecs", self.codecs, {wire.value for wire in SYNC_WIRES}, "must name formats of sums")
        _check_keys("sources", self.sources, known, "must name fields of a platform or of its sizes")
        groups = (*PRICED, BANDWIDTH, STORES)
        _check_keys("borrowed", self.borrowed, {*groups}, f"must be some of {', '.join(groups)}")

    def traffic_usd(self, downloaded_bytes: float) -> float:
        """Return dollars for bytes that leave the region, as all that a client outside reads; uploads are free."""
        return downloaded_bytes / GB * self.price_traffic_usd_gb

    def client_usd(self, counts: CountsByKind, stores: Stores) -> float:
        """Return dollars for the requests of a client outside the region, traffic included."""
        return self.counted_usd(counts, stores) + self.traffic_usd(counts.total.received_bytes)

    def prices_note(self, stores: Stores = DEFAULT_STORES) -> str:
        """Return a note of the values that are another region's, for a user of `stores`; empty if none are."""
        groups = [group for group in self.borrowed if group != STORES or not stores.is_default]
        notes = []
        for origin in dict.fromkeys(self.borrowed[group] for group in groups):
            named = [group for group in groups if self.borrowed[group] == origin]
            if set(PRICED) <= {*named}:
                what = "prices and bandwidth" if BANDWIDTH in named else "prices"
                notes.append(f"{what} of {self.region} are not known; those of {origin} are used")
            else:
                these = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
                notes.append(f"not all prices of {self.region} are known; those of {origin} are used for {these}")
        return "; ".join(notes)

    def counted_usd(self, counts: CountsByKind, stores: Stores) -> float:
        """Return dollars for the requests and the bytes in `counts`, each kind at the prices of its store."""
        return counts.usd(lambda kind: self.store(stores.of_kind(kind)))

    def size(self, name: str) -> FunctionSize:
        """Return the size called `name`; raises InvalidValue with the names of all sizes."""
        for size in self.sizes:
            if size.name == name:
                return size
        raise InvalidValue("size", name, f"must be one of {', '.join(size.name for size in self.sizes)}")

    def device_memory_mb(self, name: str) -> int | None:
        """Return the memory of the accelerator of the size called `name`; None if it has none, or is not offered."""
        found = (size.accelerator for size in self.sizes if size.name == name)
        return next((device.memory_mb for device in found if device is not None), None)

    def accelerates(self, name: str) -> bool:
        """Return True if functions of the size called `name`, if there is one, have an accelerator."""
        return self.device_memory_mb(name) is not None

    def store(self, name: str) -> StoreSpec:
        """Return the store called `name`, "default" among them; raises InvalidValue with the names of all stores."""
        if name == DEFAULT:
            terms = {item.name: getattr(self, item.name) for item in fields(StoreTerms)}
            return StoreSpec(name=DEFAULT, what=f"the storage of {self.name}", durable=True, **terms)
        for store in self.stores:
            if store.name == name:
                return store
        raise InvalidValue("store", name, f"must be one of {', '.join(self.store_names)}, which {self.name} has")

    @property
    def store_names(self) -> tuple[str, ...]:
        """All stores by name, the default one first."""
        return (DEFAULT, *(store.name for store in self.stores))

    def shared_by(self, stores: Stores) -> float | None:
        """The least that all functions together may move through the store of messages or of sums; None: no limit."""
        caps = [self.store(name).shared_bytes_s for name in (stores.messages, stores.sums)]
        return min([cap for cap in caps if cap is not None], default=None)

    def priced_at(self, share: float) -> "PlatformSpec":
        """Return the same platform, whose functions cost `share` of their price."""
        return replace(self, sizes=tuple(replace(size, price_usd_s=share * size.price_usd_s) for size in self.sizes))

    def unshared(self) -> "PlatformSpec":
        """Return the same platform, where no function notices what others move or ask for."""
        return self.without_request_limits()._without("shared_bytes_s")

    def without_request_limits(self) -> "PlatformSpec":
        """Return the same platform, whose stores take any number of requests a second."""
        return self._without("puts_s", "gets_s", "requests_s")

    def without_object_limits(self) -> "PlatformSpec":
        """Return the same platform, whose stores take objects of any size."""
        return self._without("largest_bytes")

    def _without(self, *limits: str) -> "PlatformSpec":
        """Return the same platform, whose stores do not have these limits."""
        free: dict[str, Any] = dict.fromkeys(limits)
        return replace(self, stores=tuple(replace(store, **free) for store in self.stores), **free)

    def other_stores(self, stores: Stores) -> dict[str, StoreSpec]:
        """The stores, by kind and without their sources, of what `stores` has elsewhere than in the default one."""
        names = {kind: stores.of_kind(kind) for kind in KINDS}
        return {kind: replace(self.store(name), sources={}) for kind, name in names.items() if name != DEFAULT}

    def stores_usd_h(self, stores: Stores) -> float:
        """Return dollars for an hour of `stores`, each of which counts once."""
        return sum(self.store(name).price_usd_h for name in stores.names)


def _check_keys(field: str, given: Mapping[str, object], known: set[str], rule: str) -> None:
    for name in given:
        if name not in known:
            raise InvalidValue(field, name, rule)


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
