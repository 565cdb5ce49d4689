"""The bill has the requests and bytes of each kind of object, also of functions that died, and limits count them so."""

import re
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import Progress
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import Bill, FaultTolerance, Heartbeat, PlatformSpec, RunLimits, RunSettings, Stores, StoreSpec
from funcpipe.core.stores import CountsByKind, RequestCounts
from funcpipe.errors import PlanError, RunHalted
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.documents import get_document
from funcpipe.runstate.signing import signed
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.client.threads import RUN, job, smaller_job

pytestmark = pytest.mark.usefixtures("traced")

VICTIM = "s1.r0"
STEADY = FaultTolerance(heartbeat_s=0.1, lease_s=30.0, checkpoint_steps=2)
URLS = "default=memory://a,messages=memory://b,sums=memory://c,checkpoints=memory://c"
SUMS = re.compile(r"/messages/s\d\.r\d/\d+/put-(split|merged|tied)")


def kind_in_test(key: str) -> str:
    """The kind of an object, by a rule of this test's own."""
    if "/checkpoints/" in key:
        return "checkpoints"
    return "default" if "/messages/" not in key else "sums" if SUMS.search(key) else "messages"


class Counting(MemoryStorage):
    """Counts puts, gets and bytes of each kind by itself, and keeps what the victim last told of its first attempt."""

    watches = False

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[tuple[str, str]] = Counter()
        self.told = CountsByKind()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        self.asked["puts", kind_in_test(key)] += 1
        super().put(key, data, if_absent=if_absent, gate=gate)
        self.asked["sent_bytes", kind_in_test(key)] += len(data)
        if f"/heartbeats/{VICTIM}/00000000" in key:
            last = MemoryStorage()
            last.put(key, data)
            self.told = get_document(signed(last), Heartbeat, key).counts

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        self.asked["gets", kind_in_test(key)] += 1
        data = super().get(key, start=start, stop=stop, gate=gate)
        self.asked["received_bytes", kind_in_test(key)] += len(data)
        return data


def spec(**changes: Any) -> PlatformSpec:
    """Two priced stores, "near" by requests and bytes, and "served" by the hour."""
    near = StoreSpec(
        name="near",
        what="a near one",
        latency_s=0.0,
        price_put_usd=3e-6,
        price_get_usd=2e-7,
        price_sent_usd_gb=4.0,
        price_received_usd_gb=1.0,
    )
    served = StoreSpec(name="served", what="a server", latency_s=0.0, price_put_usd=0.0, price_get_usd=0.0)
    served = replace(served, price_usd_h=0.36)
    stores = (replace(near, **changes), served)
    return replace(load_spec("local"), price_put_usd=5e-6, price_get_usd=4e-7, price_invocation_usd=0.0, stores=stores)


def prepared(
    functions: ThreadPlatform,
    storage: Counting,
    stores: Stores,
    *,
    made: Job | None = None,
    epochs: int = 1,
    limits: RunLimits | None = None,
    settings: RunSettings | None = None,
) -> PreparedRun:
    own = made or job()
    own = replace(own, epochs=epochs, prices=functions.spec, plan=replace(own.plan, stores=stores))
    session = session_on(Site(functions, storage, URLS), reopen=functions.open)
    chosen = settings or RunSettings(name=RUN)
    return prepare(own, session, faults=replace(STEADY, keep=True), limits=limits or RunLimits(), settings=chosen)


def counted(bill: Bill, kind: str) -> dict[str, int]:
    """Requests and bytes; of the default kind no bytes, as a report cannot tell its own."""
    (requests,) = [item.requests for item in bill.stores if item.kind == kind]
    names = ("puts", "gets") if kind == "default" else ("puts", "gets", "sent_bytes", "received_bytes")
    return {name: getattr(requests, name) for name in names}


MIXED = Stores(messages="near", sums="served", checkpoints="served")


def test_every_request_and_byte_is_billed_with_the_kind_of_its_object() -> None:
    storage = Counting()
    result = launch(prepared(ThreadPlatform(spec(), storage), storage, MIXED))
    items = {item.kind: item for item in result.bill.stores}
    assert {kind: item.store for kind, item in items.items()} == {
        "default": "default",
        "messages": "near",
        "sums": "served",
        "checkpoints": "served",
    }
    for kind in items:
        found = counted(result.bill, kind)
        assert found == {name: storage.asked[name, kind] for name in found}
    asked = storage.asked
    moved_usd = (asked["sent_bytes", "messages"] * 4.0 + asked["received_bytes", "messages"]) / (1 << 30)
    assert items["messages"].request_usd == pytest.approx(
        asked["puts", "messages"] * 3e-6 + asked["gets", "messages"] * 2e-7
    )
    assert items["messages"].transfer_usd == pytest.approx(moved_usd)
    assert items["sums"].hours_usd == result.bill.hours_usd == pytest.approx(result.bill.lasted_s * 1e-4)
    assert items["checkpoints"].hours_usd == 0.0  # the same server
    assert 0 < result.bill.lasted_s < 600
    assert result.bill.request_usd == pytest.approx(
        sum(item.request_usd + item.transfer_usd for item in items.values())
    )


def test_a_function_that_dies_is_billed_by_kind_for_what_its_last_heartbeat_told() -> None:
    storage, killed = Counting(), 2  # the first attempt of the victim
    functions = ThreadPlatform(
        spec(), storage, faults_of=lambda number: FunctionFaults(killed_at=60 if number == killed else None)
    )
    result = launch(prepared(functions, storage, MIXED))
    died = functions.meter_of(f"function {killed}").by_kind
    assert storage.told != CountsByKind()
    assert any(storage.told.by_kind[kind] != died.by_kind[kind] for kind in died.by_kind)
    for kind in ("default", "messages", "sums", "checkpoints"):
        for name, count in counted(result.bill, kind).items():
            lost = getattr(died.by_kind[kind], name) - getattr(storage.told.by_kind[kind], name)
            assert storage.asked[name, kind] - count == lost


DEAR = 3.0
"""Dollars for a put of two functions, which put fewer objects than six."""


def alone() -> Job:
    """The same work by two functions that send each other messages."""
    return smaller_job(replicas=1)


@pytest.mark.parametrize("changes", [{"price_put_usd": DEAR}, {"price_sent_usd_gb": DEAR * (1 << 22)}])
def test_a_run_is_ended_before_the_requests_or_the_bytes_of_a_store_cost_too_much(changes: dict[str, float]) -> None:
    storage = Counting()
    functions = ThreadPlatform(spec(**changes), storage)
    with pytest.raises(RunHalted, match=r"it would cost more than \$1500"):
        launch(prepared(functions, storage, MIXED, made=alone(), epochs=100, limits=RunLimits(max_usd=1500.0)))
    by_byte_usd = changes.get("price_sent_usd_gb", 0.0) / (1 << 30)
    spent_usd = storage.asked["puts", "messages"] * changes.get("price_put_usd", 0.0)
    spent_usd += storage.asked["sent_bytes", "messages"] * by_byte_usd
    assert 500 < spent_usd < 3000  # 300 steps would cost some 10,000 dollars


def test_a_run_is_ended_before_the_hours_of_a_store_cost_too_much_and_who_resumes_it_counts_them() -> None:
    storage, dollar_a_second = Counting(), replace(spec().store("served"), price_usd_h=3600.0)
    prices = replace(spec(), stores=(spec().store("near"), dollar_a_second))
    functions = ThreadPlatform(prices, storage)
    limits, began_s = RunLimits(max_usd=0.6), time.monotonic()
    with pytest.raises(RunHalted, match=r"it would cost more than \$0\.6"):
        launch(prepared(functions, storage, MIXED, epochs=1000, limits=limits))
    took_s = time.monotonic() - began_s
    again = prepared(functions, storage, MIXED, epochs=1000, settings=RunSettings(resume=RUN))
    assert 0 < again.account.elapsed_s < took_s
    assert again.account.spent_usd == pytest.approx(again.account.elapsed_s, rel=0.2)  # hardly anything else costs


def test_progress_tells_what_the_bill_does() -> None:
    storage = Counting()
    seen: list[Progress] = []
    result = launch(prepared(ThreadPlatform(spec(), storage), storage, MIXED), seen.append)
    assert 0 < seen[0].cost_usd <= seen[-1].cost_usd <= result.bill.cost_usd * 1.02 + 1e-6


def test_a_store_without_a_price_is_refused_before_anything_starts() -> None:
    storage = Counting()
    functions = ThreadPlatform(spec(), storage)
    with pytest.raises(PlanError, match="in the store express, which local has no prices for"):
        prepared(functions, storage, Stores(messages="express", sums="served", checkpoints="served"))
    assert not storage.asked


def test_a_bill_that_an_earlier_version_made_has_no_items_and_gets_none() -> None:
    old = Bill(platform="local", functions=1, function_seconds=1.0, puts=5, gets=7, compute_usd=0.5, request_usd=0.25)
    client = CountsByKind(default=RequestCounts(puts=2, gets=3))
    made = old.with_client(client, spec(), Stores())
    assert (made.stores, made.puts, made.gets, made.client) == ((), 7, 10, RequestCounts(puts=2, gets=3))
    assert made.cost_usd == pytest.approx(0.75 + 2 * 5e-6 + 3 * 4e-7)
