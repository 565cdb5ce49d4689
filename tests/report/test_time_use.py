from dataclasses import replace

import pytest

from funcpipe.core import Event, Prices, Resource, Source, Trace
from funcpipe.report.time_use import Use, time_use
from tests.report.html.large import material


def event(task: str, lane: Resource, start_s: float, end_s: float, waited_s: float = 0.0) -> Event:
    return Event(
        task=task, stage=0, replica=0, lane=lane, step=0, start_s=start_s, end_s=end_s, waited_s=waited_s
    )  # fmt: skip


TRACE = Trace(
    run="r",
    source=Source.EXECUTED,
    events=(
        event("load.s0.m0", Resource.LOAD, 0, 1),
        event("forward.s0.m0", Resource.COMPUTE, 1, 4),
        event("put_activation.s0.m0", Resource.UPLOAD, 3, 6),  # one second of it beside the forward
        event("get_gradient.s0.m0", Resource.DOWNLOAD, 6, 9, 2),
        event("put_split.s0", Resource.UPLOAD, 10, 12),
    ),
    prices=Prices(function_usd_s=(2.0,), put_usd=1.0, get_usd=1.0),
)


def test_every_second_counts_once_and_compute_before_what_it_overlaps() -> None:
    (stage,) = time_use(TRACE)
    assert stage.seconds == {
        Use.COMPUTE: 3,
        Use.SYNC: 2,
        Use.TRANSFER: 3,
        Use.LOAD: 1,
        Use.WAIT: 2,
        Use.BUBBLE: 1,
        Use.START: 0,
    }
    assert stage.usd is not None
    assert stage.usd[Use.BUBBLE] == 2.0


def test_uses_add_up_to_the_life_of_all_functions() -> None:
    made = material(steps=2)
    assert made.observed is not None
    assert made.finished is not None
    found = time_use(made.observed)
    assert sum(sum(stage.seconds.values()) for stage in found) == pytest.approx(4 * made.observed.duration_s)
    longer = time_use(made.observed, made.finished.workers)
    assert all(stage.seconds[Use.START] > 0 for stage in longer)


def test_a_trace_without_events_or_prices() -> None:
    assert time_use(replace(TRACE, events=())) == ()
    assert time_use(replace(TRACE, prices=None))[0].usd is None
