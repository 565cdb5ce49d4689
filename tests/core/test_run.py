"""Payloads and reports of workers, old and new."""

import json
from dataclasses import asdict, replace

from funcpipe.core import (
    Bill,
    CountsByKind,
    FaultTolerance,
    Heartbeat,
    OnOutOfMemory,
    RequestCounts,
    RunAccount,
    RunLimits,
    StoreBill,
    StoreSpec,
    WorkerReport,
    WorkerSpec,
    from_text,
    to_text,
)
from tests.e2e import small
from tests.run_documents import BEAT, REPORT


def spec() -> WorkerSpec:
    return WorkerSpec(
        run="run-1",
        attempt=0,
        stage=1,
        replica=0,
        plan=small.plan(),
        storage="memory://",
        platform="local:///unused",
        bundle="b",
        bundle_sha256="0",
        parameters="p",
        epochs=1,
        seed=0,
        message_deadline_s=60.0,
        faults=FaultTolerance(
            checkpoint_steps=4,
            retained_bytes=1 << 20,
            lifetime_s=900.0,
            cold_start_s=2.5,
            start_s=30.0,
            heartbeat_s=5.0,
            lease_s=7.0,
        ),
        limits=RunLimits(max_usd=3.0),
        account=RunAccount(spent_usd=0.25, elapsed_s=60.0, run_usd_s=0.01, usd_s=0.002),
    )


def test_a_payload_reads_back_as_it_was_written() -> None:
    grows = FaultTolerance(on_oom=OnOutOfMemory.GROW, keep=True)
    for written in (spec(), replace(spec(), faults=grows)):
        assert from_text(WorkerSpec, to_text(written), source="payload") == written


def without(written: WorkerSpec | Heartbeat | WorkerReport | Bill, *names: str) -> str:
    """The document as a version wrote it that did not know these fields."""
    return json.dumps({name: value for name, value in json.loads(to_text(written)).items() if name not in names})


COUNTS = RequestCounts(puts=4, lists=1, gets=6, empty_gets=2, sent_bytes=100, received_bytes=50)
BY_KIND = CountsByKind(default=RequestCounts(puts=1), messages=COUNTS)
COUNTED = replace(REPORT, **asdict(COUNTS))


def test_what_was_counted_before_kinds_were_is_all_of_the_default_kind() -> None:
    beat = replace(BEAT, requests=COUNTS, by_kind=BY_KIND)
    assert from_text(Heartbeat, to_text(beat), source="beat").counts == BY_KIND
    assert from_text(Heartbeat, without(beat, "by_kind"), source="beat").counts == CountsByKind(default=COUNTS)
    report = replace(COUNTED, by_kind=BY_KIND)
    assert from_text(WorkerReport, to_text(report), source="report").counts == BY_KIND
    assert from_text(WorkerReport, without(report, "by_kind"), source="report").counts == CountsByKind(default=COUNTS)


def test_an_account_keeps_the_prices_of_stores_and_without_them_all_is_in_the_default_one() -> None:
    near = StoreSpec(name="near", what="near", latency_s=0.0, price_put_usd=0.5, price_get_usd=0.0)
    account = RunAccount(put_usd=2.0, get_usd=3.0, empty_get_usd=5.0, hours_usd_s=0.1, stores={"messages": near})
    written = replace(spec(), account=account)
    assert from_text(WorkerSpec, to_text(written), source="payload") == written
    assert account.counted_usd(BY_KIND) == 2.0 + 5 * 0.5  # listing costs as much as putting
    assert replace(account, stores={}).counted_usd(BY_KIND) == 2.0 + 5 * 2.0 + 4 * 3.0 + 2 * 5.0


def test_a_bill_without_items_of_stores_is_still_read() -> None:
    item = StoreBill(kind="messages", store="near", requests=COUNTS, request_usd=0.1, transfer_usd=0.2, hours_usd=0.3)
    bill = Bill(
        platform="local",
        functions=1,
        function_seconds=1.0,
        puts=4,
        gets=6,
        compute_usd=1.0,
        request_usd=0.3,
        hours_usd=0.3,
        lasted_s=5.0,
        stores=(item,),
    )
    assert from_text(Bill, to_text(bill), source="bill") == bill
    old = from_text(Bill, without(bill, "hours_usd", "lasted_s", "stores"), source="bill")
    assert (old.stores, old.hours_usd, old.cost_usd) == ((), 0.0, 1.3)
