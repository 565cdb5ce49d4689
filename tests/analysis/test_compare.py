from dataclasses import replace

import pytest

from funcpipe.analysis.compare import Report, compare, typical_step
from funcpipe.core import Event, Prices, Resource, Source, Stores, StoreSpec, Trace, from_text, prices_of, to_text
from funcpipe.errors import PlanError
from funcpipe.platforms.catalog import load_spec
from tests.e2e import small


def event(step: int, lane: Resource, start_s: float, end_s: float, *, replica: int = 0, waited_s: float = 0.0) -> Event:
    return Event(
        task="t",
        stage=0,
        replica=replica,
        lane=lane,
        step=step,
        start_s=start_s,
        end_s=end_s,
        waited_s=waited_s,
    )


def trace(source: Source, *events: Event) -> Trace:
    return Trace(run="r", source=source, events=events)


PREDICTED = trace(
    Source.SIMULATED,
    event(0, Resource.COMPUTE, 0, 2),
    event(0, Resource.COMPUTE, 0, 2, replica=1),
    event(0, Resource.DOWNLOAD, 2, 2.5),
)


def test_lanes_are_compared_by_their_work_without_their_waits() -> None:
    observed = []
    for step in range(3):
        observed += [
            event(step, Resource.COMPUTE, 5 * step, 5 * step + 3),
            event(step, Resource.COMPUTE, 5 * step, 5 * step + 2, replica=1),
            event(step, Resource.DOWNLOAD, 5 * step, 5 * step + 4, waited_s=3),
        ]
    observed.append(event(3, Resource.COMPUTE, 15, 16))  # a short last step
    found = compare(PREDICTED, trace(Source.EXECUTED, *observed))
    assert (found.steps, found.predicted_iteration_s, found.observed_iteration_s) == (3, 2.5, 5)
    assert [
        (lane.lane, lane.predicted.busy_s, lane.observed.busy_s, lane.observed.wait_s, lane.observed.idle_s)
        for lane in found.lanes
    ] == [(Resource.COMPUTE, 2.0, 2.5, 0.0, 2.5), (Resource.DOWNLOAD, 0.25, 0.5, 1.5, 3.0)]
    assert found.lanes[0].predicted.idle_s == 0.5
    assert found.lanes[0].observed.usd is None
    assert found.lanes[0].ratio == pytest.approx(1.25)
    assert found.ratio == pytest.approx(2.0)
    assert from_text(Report, to_text(found), source="x") == found


def test_what_a_lane_does_at_once_is_counted_once() -> None:
    """Three downloads are open together: for 3 s one at least waits while none moves, and for 1 s bytes move."""
    own = [event(0, Resource.DOWNLOAD, 0, 4, waited_s=3) for _ in range(3)]
    (lane,) = compare(trace(Source.SIMULATED, *own), trace(Source.EXECUTED, *own)).lanes
    assert (lane.observed.busy_s, lane.observed.wait_s, lane.observed.idle_s) == (1.0, 3.0, 0.0)


def test_bubbles_and_requests_have_their_price() -> None:
    """Two functions at $3 a second; computing 2 s of 2.5; one get at $7."""
    priced = replace(PREDICTED, prices=Prices(function_usd_s=(3.0,), put_usd=5.0, get_usd=7.0))
    compute, download = compare(priced, PREDICTED).lanes
    assert (compute.predicted.usd, compute.predicted.idle_usd) == (2 * 2.5 * 3, 2 * 0.5 * 3)
    assert (download.predicted.usd, download.predicted.idle_usd) == (7, 0)


def test_a_transfer_costs_what_the_store_of_its_kind_asks() -> None:
    """Messages in a store of $1 a put, $2 a get, and by the GB; sums in the default one, at $5 and $7."""
    near = StoreSpec(name="near", what="near", latency_s=0.0, price_put_usd=1.0, price_get_usd=2.0)
    near = replace(near, price_sent_usd_gb=8.0, price_received_usd_gb=16.0)
    prices = Prices(function_usd_s=(0.0,), put_usd=5.0, get_usd=7.0, stores={"messages": near})
    moved = Event(task="", stage=0, replica=0, lane=Resource.UPLOAD, step=0, start_s=0, end_s=1, payload_bytes=1 << 28)
    tasks = {"put-activation.s0.r0.m0": 1 + 2.0, "put-split.s0.r0.k1": 5.0, "put-tied-sum.s0.r0": 5.0}
    assert {task: prices.transfer_usd(replace(moved, task=task)) for task in tasks} == tasks
    got = replace(moved, lane=Resource.DOWNLOAD)
    tasks = {"get-gradient.s0.r0.m0": 2 + 4.0, "get-merged.s0.r0.k1": 7.0}
    assert {task: prices.transfer_usd(replace(got, task=task)) for task in tasks} == tasks
    assert prices.transfer_usd(replace(moved, task="forward.s0.r0.m0", lane=Resource.COMPUTE)) == 0.0


def test_prices_of_a_plan_name_its_stores() -> None:
    spec = load_spec("aws-lambda")
    plan = replace(small.plan(), platform=spec.name, stores=Stores(messages="valkey", sums="express"))
    plan = replace(plan, stages=tuple(replace(stage, size=spec.sizes[0].name) for stage in plan.stages))
    assert {kind: store.name for kind, store in prices_of(plan, spec).stores.items()} == {
        "messages": "valkey",
        "sums": "express",
    }


def test_the_typical_step_has_the_median_duration_and_begins_at_nought() -> None:
    lengths = {0: 9.0, 1: 4.0, 2: 5.0, 3: 1.0}
    events = [event(step, Resource.COMPUTE, 10 * step, 10 * step + length) for step, length in lengths.items()]
    events += [event(step, Resource.UPLOAD, 10 * step, 10 * step + 1) for step in range(3)]  # step 3 is a short one
    found = typical_step(trace(Source.EXECUTED, *events))
    assert (found.steps(), found.duration_s, found.events[0].start_s) == ((2,), 5.0, 0.0)


def test_a_single_step_is_compared_by_its_duration() -> None:
    observed = trace(Source.EXECUTED, event(7, Resource.COMPUTE, 1, 4), event(7, Resource.DOWNLOAD, 2, 5))
    assert compare(PREDICTED, observed).observed_iteration_s == 4


def test_traces_of_different_plans_are_not_compared() -> None:
    with pytest.raises(PlanError, match="not of the same plan"):
        compare(PREDICTED, trace(Source.EXECUTED, event(0, Resource.UPLOAD, 0, 1)))
    with pytest.raises(PlanError, match="a trace has no events"):
        compare(PREDICTED, trace(Source.EXECUTED))
