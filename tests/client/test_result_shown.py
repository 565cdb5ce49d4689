"""A run's result shows what it took in a few lines, however large its model is."""

from dataclasses import replace
from xml.etree import ElementTree

import torch

from funcpipe.client.follow.results import RunResult
from funcpipe.core import Bill, RequestCounts, Source, StoreBill, Trace, ValidationReport

RESULT = RunResult(
    run="run-1",
    losses=tuple(2.0 / (step + 1) for step in range(200)),
    tensors={f"layer{i}.weight": torch.zeros(100, 10) for i in range(50)},
    trace=Trace(run="run-1", source=Source.EXECUTED, events=()),
    bill=Bill(
        platform="local",
        functions=4,
        function_seconds=12.0,
        puts=3,
        gets=5,
        lists=2,
        compute_usd=0.25,
        request_usd=0.25,
    ),
    workers=(),
    skipped_steps=(7,),
    callback_errors=(ValueError("x"),),
    validations=(ValidationReport(step=100, samples=9, values={"val_loss": 0.5}, best_step=50, best_value=0.25),),
)


def test_it_is_a_few_lines() -> None:
    assert repr(RESULT).splitlines() == [
        "Result of run run-1: 200 steps, loss 2.0000 -> 0.0100",
        "  cost: $0.50 at the prices of local",
        "  used: 4 functions for 12.0 s, 3 puts, 2 lists, 5 gets",
        "  model: 50 tensors of 50,000 numbers: state_dict()",
        "  skipped: 1 step whose gradients were not finite: 8",
        "  validated: after step 100: val_loss 0.5000; the best was after step 50",
        "  callbacks: 1 callback failed: callback_errors",
    ]


def test_stores_other_than_the_default_one_have_a_line() -> None:
    near = StoreBill(kind="messages", store="near", requests=RequestCounts(), request_usd=0.25, transfer_usd=0.5)
    rest = replace(near, kind="default", store="default", transfer_usd=0.0)
    bill = replace(RESULT.bill, stores=(rest, near))
    assert "  stores: default in default $0.25, messages in near $0.75" in repr(replace(RESULT, bill=bill)).splitlines()
    assert "stores" not in repr(replace(RESULT, bill=replace(bill, stores=(rest,))))


def test_what_a_client_has_downloaded_is_said_where_it_costs_anything() -> None:
    bill = replace(RESULT.bill, traffic_usd=0.25, client=RequestCounts(received_bytes=3 << 20))
    lines = repr(replace(RESULT, bill=bill)).splitlines()
    assert "  cost: $0.75 at the prices of local" in lines
    assert "  used: 4 functions for 12.0 s, 3 puts, 2 lists, 5 gets, 3.0 MB downloaded" in lines


def test_a_notebook_draws_its_losses() -> None:
    page = ElementTree.fromstring(RESULT._repr_html_())
    (line,) = [element for element in page.iter() if element.tag.endswith("polyline")]
    assert len(str(line.get("points")).split()) == 200
