"""The cost of a run: what it has cost so far, and its bill, of functions and of each store by kind of object."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from funcpipe.core import checks
from funcpipe.core.platform import MB, PlatformSpec
from funcpipe.core.stores import DEFAULT, CountsByKind, RequestCounts, Stores, StoreSpec
from funcpipe.core.texts import usd_text


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBill:
    """The use that one kind of object made of its store in a run, by all functions and the client that makes the bill.

    The kinds are messages, sums, checkpoints, and "default": all else, such as records, leases and data, without the
    bytes of what a function writes and reads after it has counted them, to make its report. `request_usd` pays for the
    requests, `transfer_usd` for the bytes. `hours_usd` pays for the hours of a store that is there for the run; the
    first kind that is in the store has it.
    """

    kind: str
    store: str
    requests: RequestCounts
    request_usd: float
    transfer_usd: float
    hours_usd: float = 0.0

    @property
    def cost_usd(self) -> float:
        """All dollars of it."""
        return self.request_usd + self.transfer_usd + self.hours_usd


def store_bills(
    counts: CountsByKind, prices: PlatformSpec, stores: Stores, *, lasted_s: float
) -> tuple[StoreBill, ...]:
    """Return an item for each kind that used its store in a run that has lasted `lasted_s`."""
    found: list[StoreBill] = []
    paid: set[str] = set()
    for kind, requests in counts.by_kind.items():
        store = prices.store(stores.of_kind(kind))
        hours_usd = 0.0 if store.name in paid else store.price_usd_h / 3600 * lasted_s
        paid.add(store.name)
        if requests != RequestCounts() or hours_usd:
            item = StoreBill(
                kind=kind,
                store=store.name,
                requests=requests,
                request_usd=store.asked_usd(requests),
                transfer_usd=store.transfer_usd(requests.sent_bytes, requests.received_bytes),
                hours_usd=hours_usd,
            )
            found.append(item)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The usage of a run and its cost at the prices of `platform`; `earlier_usd` is the cost before it was resumed.

    `puts`, `lists` and `gets` are the requests of all its functions, and of the client that makes the bill, which alone
    are those in `client`. Functions that died reported their requests with their last heartbeats: requests made
    afterwards, within `heartbeat_s` at most, are missing, and so are those of a function that never became its
    worker.

    `request_usd` pays for invocations, storage requests and bytes. `hours_usd` pays for stores that cost by the hour;
    where there are such, `lasted_s` is how long the run took since it was last started. `traffic_usd` pays for what the
    client has downloaded. `stores` has what each kind of object took; older bills lack it. `prices_note` says which
    prices are another region's.
    """

    FORMAT: ClassVar[str] = "funcpipe.bill/1"

    platform: str
    functions: int
    function_seconds: float
    puts: int
    gets: int
    compute_usd: float
    request_usd: float
    earlier_usd: float = 0.0
    lists: int = 0
    client: RequestCounts = field(default_factory=RequestCounts)
    hours_usd: float = 0.0
    lasted_s: float = 0.0
    stores: tuple[StoreBill, ...] = ()
    prices_note: str = ""
    traffic_usd: float = 0.0

    @property
    def cost_usd(self) -> float:
        """Dollars for functions, requests, stores and traffic together, from the start of the run."""
        return self.earlier_usd + self.compute_usd + self.request_usd + self.hours_usd + self.traffic_usd

    @property
    def requests_text(self) -> str:
        """The requests in words, and what the client has downloaded where that costs anything."""
        text = f"{self.puts} puts, {self.lists} lists, {self.gets} gets"
        return f"{text}, {self.client.received_bytes / MB:.1f} MB downloaded" if self.traffic_usd else text

    def with_client(self, client: CountsByKind, prices: PlatformSpec, stores: Stores) -> "Bill":
        """This bill, made for functions alone, with what the client has asked of the storage."""
        asked = client.total
        items: tuple[StoreBill, ...] = ()
        if self.stores or not self.puts:
            counts = CountsByKind(**{item.kind: item.requests for item in self.stores}) + client
            items = store_bills(counts, prices, stores, lasted_s=self.lasted_s)
        return replace(
            self,
            puts=self.puts + asked.puts,
            lists=self.lists + asked.lists,
            gets=self.gets + asked.gets,
            request_usd=self.request_usd + prices.counted_usd(client, stores),
            client=asked,
            traffic_usd=prices.traffic_usd(asked.received_bytes),
            stores=items,
        )


def earlier_text(bill: Bill) -> str:
    """Return the part of a bill that is from before its run was resumed, in words."""
    return f", ${usd_text(bill.earlier_usd)} of it before it was resumed" if bill.earlier_usd else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccount:
    """The cost and time of a run when a function was invoked, and the prices of functions and requests.

    It had cost `spent_usd`, and `requests_usd` for the requests of this generation. All functions of the run together
    cost `run_usd_s` a second, this one costs `usd_s`; a put or a listing costs `put_usd`, a get `get_usd`, or
    `empty_get_usd` if there is no such object; to invoke a function costs `invocation_usd`. `stores` are the stores, by
    kind, of what is not in the default one, and `hours_usd_s` is what they cost a second, while they are there. To
    download what the run leaves costs the client `collect_usd`. `step_s` is the longest of the last steps.
    """

    spent_usd: float = 0.0
    elapsed_s: float = 0.0
    run_usd_s: float = 0.0
    usd_s: float = 0.0
    requests_usd: float = 0.0
    put_usd: float = 0.0
    get_usd: float = 0.0
    empty_get_usd: float = 0.0
    invocation_usd: float = 0.0
    hours_usd_s: float = 0.0
    collect_usd: float = 0.0
    step_s: float = 0.0
    stores: Mapping[str, StoreSpec] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name != "stores":
                checks.at_least(item.name, getattr(self, item.name), 0)

    def store(self, kind: str) -> StoreSpec:
        """Return the prices of the store that objects of `kind` are in."""
        return self.stores.get(kind) or _default_store(self.put_usd, self.get_usd, self.empty_get_usd)

    def counted_usd(self, counts: CountsByKind) -> float:
        """Return dollars for the requests and the bytes in `counts`."""
        return counts.usd(self.store)


@functools.lru_cache(maxsize=64)
def _default_store(put_usd: float, get_usd: float, empty_get_usd: float) -> StoreSpec:
    return StoreSpec(
        name=DEFAULT,
        what="the default store",
        latency_s=0.0,
        price_put_usd=put_usd,
        price_get_usd=get_usd,
        price_empty_get_usd=empty_get_usd,
    )
