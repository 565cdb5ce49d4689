from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.analysis.compare import account, time_use
from funcpipe.core import Event, Prices, Resource, Source, Trace, Use
from funcpipe.core.trace import IN_STEPS, uses_of
from tests.show.large import material


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


def moments(events: list[Event], begin_s: int, end_s: int) -> dict[Use, float]:
    """What whole seconds are spent on, looked at one by one."""
    found = dict.fromkeys(IN_STEPS, 0.0)
    for second in range(begin_s, end_s):
        doing = set()
        for one in events:
            if one.start_s <= second < one.start_s + one.waited_s:
                doing.add(Use.WAIT)
            elif one.start_s + one.waited_s <= second < one.end_s:
                kind = one.task.partition(".")[0]
                doing.add(
                    Use.LOAD
                    if kind == "load"
                    else Use.SYNC
                    if kind in ("put-split", "merge", "get-norm", "add-tied")
                    else Use.TRANSFER
                    if one.lane in (Resource.UPLOAD, Resource.DOWNLOAD, Resource.TO_HOST, Resource.TO_DEVICE)
                    else Use.COMPUTE
                )
        found[next((use for use in IN_STEPS if use in doing), Use.BUBBLE)] += 1
    return found


TASKS = {
    "load.s0.m0": Resource.LOAD,
    "forward.s0.m0": Resource.COMPUTE,
    "add-tied.s0": Resource.COMPUTE,
    "put-activation.s0.m0": Resource.UPLOAD,
    "put-split.s0": Resource.UPLOAD,
    "get-gradient.s0.m0": Resource.DOWNLOAD,
    "get-norm.s0": Resource.DOWNLOAD,
    "merge.s0": Resource.MERGE,
    "activation-to-host.s0.m0": Resource.TO_HOST,
    "gradient-to-device.s0.m0.p1": Resource.TO_DEVICE,
}


@given(
    drawn=st.lists(
        st.tuples(st.sampled_from(sorted(TASKS)), st.integers(-3, 12), st.integers(0, 6), st.integers(0, 6)), max_size=8
    ),
    window=st.tuples(st.integers(0, 4), st.integers(4, 12)),
)
def test_every_second_is_what_its_most_useful_lane_does(
    drawn: list[tuple[str, int, int, int]], window: tuple[int, int]
) -> None:
    events = [
        event(task, TASKS[task], start_s, start_s + waited_s + works_s, waited_s)
        for task, start_s, waited_s, works_s in drawn
    ]
    assert uses_of(events, *window) == moments(events, *window)


def test_every_second_counts_once_and_compute_before_what_it_overlaps() -> None:
    (stage,) = time_use(TRACE)
    assert {use: seconds for use, seconds in stage.seconds.items() if seconds} == {
        Use.COMPUTE: 3,
        Use.SYNC: 2,
        Use.TRANSFER: 3,
        Use.LOAD: 1,
        Use.WAIT: 2,
        Use.BUBBLE: 1,
    }
    assert stage.usd is not None
    assert stage.usd[Use.BUBBLE] == 2.0


def test_uses_add_up_to_the_steps_of_all_functions() -> None:
    made = material(steps=2)
    assert made.observed is not None
    found = time_use(made.observed)
    assert sum(sum(stage.seconds.values()) for stage in found) == pytest.approx(4 * made.observed.duration_s)


def test_what_lies_between_traced_steps_is_no_part_of_them() -> None:
    """A trace has each attempt's last steps: 60 s of other steps lie between these."""
    later = [replace(one, step=9, start_s=one.start_s + 72, end_s=one.end_s + 72) for one in TRACE.events]
    trace = replace(TRACE, events=(*TRACE.events, *later))
    assert trace.duration_s == 84
    assert trace.steps_s == 24
    (stage,) = time_use(trace)
    (once,) = time_use(TRACE)
    assert stage.seconds == {use: 2 * seconds for use, seconds in once.seconds.items()}


def test_the_account_of_a_run_adds_up_to_its_bill() -> None:
    finished = material(steps=2).finished
    assert finished is not None
    found = account(finished)
    assert [stage.stage for stage in found] == [0, 1, None]  # s0.r1 was started again; its first attempt is lost
    assert found[-1].seconds[Use.LOST] > 0
    assert sum(sum(stage.seconds.values()) for stage in found) == pytest.approx(finished.bill.function_seconds)
    assert sum(sum((stage.usd or {}).values()) for stage in found) == pytest.approx(finished.bill.compute_usd)
    assert account(replace(finished, workers=())) == ()


def test_a_trace_without_events_or_prices() -> None:
    assert time_use(replace(TRACE, events=())) == ()
    assert time_use(replace(TRACE, prices=None))[0].usd is None
