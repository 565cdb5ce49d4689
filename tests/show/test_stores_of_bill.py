"""The bill of a run in a terminal: a line for each kind of object where several stores are used."""

import io
from dataclasses import replace

from rich.console import Console

from funcpipe.core import Bill, Estimate, RequestCounts, StoreBill, StoreEstimate
from funcpipe.show.runs import stores_of_bill
from funcpipe.show.terminal import print_table

ASKED = RequestCounts(puts=120, lists=3, gets=240, sent_bytes=3 << 20, received_bytes=6 << 20)
NEAR = StoreBill(kind="messages", store="near", requests=ASKED, request_usd=0.25, transfer_usd=0.5, hours_usd=0.125)
REST = StoreBill(kind="default", store="default", requests=ASKED, request_usd=0.001, transfer_usd=0.0)
BILL = Bill(platform="local", functions=1, function_seconds=1.0, puts=240, gets=480, compute_usd=1.0, request_usd=0.751)
EXPECTED = Estimate(
    iteration_s=1.0,
    cost_usd=1.0,
    compute_usd=1.0,
    request_usd=0.0,
    peak_memory_bytes=1,
    puts=1,
    gets=1,
    bottleneck="compute",
    stages=(),
    stores=(
        StoreEstimate(
            kind="messages",
            store="near",
            puts=1,
            gets=1,
            sent_bytes=1,
            received_bytes=1,
            request_usd=0.0625,
            transfer_usd=0.125,
        ),
    ),
)


def shown(bill: Bill, expected: Estimate | None) -> list[list[str]]:
    """The words of each line."""
    console = Console(file=io.StringIO(), width=160)
    for table in stores_of_bill(bill, expected, 4):
        print_table(console, table)
    return [line.split() for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]


def test_a_line_for_each_kind_beside_what_its_plan_expected_of_as_many_steps() -> None:
    bill = replace(BILL, stores=(REST, NEAR))
    numbers = ["120", "3", "240", "0.250000", "3.00", "6.00", "0.500000", "0.125000", "0.875000"]
    lines = shown(bill, EXPECTED)
    assert ["messages", "near", *numbers, "0.750000", "1.17"] in lines
    assert lines[-2][:3] == ["all", "else", "default"]
    assert lines[-2][-1] == "-"
    assert ["messages", "near", *numbers, "-", "-"] in shown(bill, None)


def test_nothing_where_all_is_in_the_default_store() -> None:
    assert shown(replace(BILL, stores=(REST,)), EXPECTED) == shown(BILL, EXPECTED) == []
