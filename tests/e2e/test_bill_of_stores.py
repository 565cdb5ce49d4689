"""The bill of a run in several stores has an item for each, which equals counts made in another way."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.cli import main
from funcpipe.core import Bill, PlatformSpec, Stores, StoreSpec, Trace, read_trace, write
from funcpipe.core.json_form import from_plain
from funcpipe.platforms.catalog import load_spec
from tests.e2e import small

GB = 1 << 30
JOB = [
    "train",
    "tests.e2e.small:model",
    "--data",
    "tests.e2e.small:data",
    "--epochs",
    "1",
    "--json",
    "--set",
    "training.keep-model=false",
]


def store(name: str, **prices: float) -> StoreSpec:
    free = {"latency_s": 0.0, "price_put_usd": 0.0, "price_get_usd": 0.0}
    return StoreSpec(name=name, what=name, **(free | prices))  # type: ignore[arg-type]


def spec() -> PlatformSpec:
    """Local functions with two priced stores, one by requests and bytes, one by the hour."""
    near = store("near", price_put_usd=3e-6, price_get_usd=2e-7, price_empty_get_usd=1e-7)
    near = replace(near, price_sent_usd_gb=5.0, price_received_usd_gb=2.0)
    served = store("served", price_put_usd=0.0, price_usd_h=3.6)
    return replace(load_spec("local"), price_put_usd=7e-6, price_get_usd=9e-7, stores=(near, served))


def trained(
    folder: Path, stores: Stores, storage: str, capsys: pytest.CaptureFixture[str]
) -> tuple[Bill, Trace, float]:
    """The bill and the trace of a run whose plan has `stores`, and how long it took from step to step."""
    folder.mkdir(exist_ok=True)
    write(replace(small.plan(), stores=stores), folder / "plan.json")
    write(spec(), folder / "spec.json")
    files = ["--plan", str(folder / "plan.json"), "--set", f"platform.spec={folder / 'spec.json'}"]
    output = ["--trace", str(folder / "trace.json"), "-o", str(folder / "model.pt")]
    assert main([*JOB, *files, *output, "--storage", storage]) == 0
    told = json.loads(capsys.readouterr().out)
    trace = read_trace(folder / "trace.json")
    assert trace.steps() == tuple(range(len(told["losses"])))  # all of them
    return from_plain(Bill, told["bill"], source="--json"), trace, trace.duration_s


def events_of(trace: Trace, *kinds: str) -> tuple[int, int]:
    """How many objects tasks of these kinds moved, and how many bytes."""
    found = [event for event in trace.events if event.task.partition(".")[0] in kinds]
    return len(found), sum(event.payload_bytes for event in found)


PUTS = {"messages": ("put-activation", "put-gradient"), "sums": ("put-split", "put-merged")}
GETS = {"messages": ("get-activation", "get-gradient"), "sums": ("get-split", "get-merged")}

TRIAL_PUTS, TRIAL_GETS = 2, 1
"""The client puts one object twice and reads it, to see whether the store keeps the first and finds it at once."""


def test_each_item_is_what_the_trace_has_at_the_prices_of_its_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages in a folder of their own, by requests and bytes; sums in one by the hour; all else in the default."""
    storage = ",".join(f"{kind}={(tmp_path / kind).as_uri()}" for kind in ("default", "messages", "sums"))
    bill, trace, steps_s = trained(tmp_path, Stores(messages="near", sums="served"), storage, capsys)
    items = {item.kind: item for item in bill.stores}
    stores = {kind: item.store for kind, item in items.items()}
    assert stores == {"default": "default", "messages": "near", "sums": "served", "checkpoints": "default"}
    for kind in ("messages", "sums"):
        asked = items[kind].requests
        puts, sent_bytes = events_of(trace, *PUTS[kind])
        gets, received_bytes = events_of(trace, *GETS[kind])
        assert (asked.puts - TRIAL_PUTS, asked.gets - asked.empty_gets - TRIAL_GETS) == (puts, gets)
        assert puts > 0
        assert sent_bytes <= asked.sent_bytes <= 1.1 * sent_bytes + 1000 * asked.puts  # heads of messages
        assert received_bytes <= asked.received_bytes <= 1.1 * received_bytes + 1000 * (gets + TRIAL_GETS)
    near, served = items["messages"], items["sums"]
    asked = near.requests
    found = asked.gets - asked.empty_gets
    assert near.request_usd == pytest.approx((asked.puts + asked.lists) * 3e-6 + found * 2e-7 + asked.empty_gets * 1e-7)
    assert near.transfer_usd == pytest.approx((asked.sent_bytes * 5.0 + asked.received_bytes * 2.0) / GB)
    assert (near.hours_usd, served.request_usd, served.transfer_usd) == (0.0, 0.0, 0.0)
    assert bill.hours_usd == served.hours_usd == pytest.approx(bill.lasted_s * 0.001)
    assert steps_s < bill.lasted_s < steps_s + 60
    for kind in ("default", "checkpoints"):
        asked = items[kind].requests
        expected_usd = (asked.puts + asked.lists) * 7e-6 + asked.gets * 9e-7
        assert items[kind].cost_usd == pytest.approx(expected_usd)
        assert asked.puts > 0
    invoked_usd = bill.functions * spec().price_invocation_usd
    assert bill.cost_usd == pytest.approx(bill.compute_usd + invoked_usd + sum(item.cost_usd for item in bill.stores))
    assert bill.puts == sum(item.requests.puts for item in bill.stores)
    assert bill.gets == sum(item.requests.gets for item in bill.stores)
    assert bill.lists == sum(item.requests.lists for item in bill.stores)


def test_in_one_store_a_run_costs_what_its_requests_cost_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As bills were made before they had items: all requests at the default store's prices."""
    bill, _, _ = trained(tmp_path, Stores(), (tmp_path / "objects").as_uri(), capsys)
    assert {item.store for item in bill.stores} == {"default"}
    invoked_usd = bill.functions * spec().price_invocation_usd
    assert bill.request_usd == pytest.approx((bill.puts + bill.lists) * 7e-6 + bill.gets * 9e-7 + invoked_usd)
    assert (bill.hours_usd, bill.lasted_s) == (0.0, 0.0)
    assert bill.cost_usd == pytest.approx(bill.compute_usd + bill.request_usd)
