from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funcpipe.core import Event, Resource, ScheduleKind, Sync
from funcpipe.scheduler.clocks import aligned, clock_corrections
from funcpipe.scheduler.graph import StepShape, build_graph
from funcpipe.scheduler.simulator.costs import Cost
from funcpipe.scheduler.simulator.simulate import simulate
from funcpipe.scheduler.tasks import Task, source_of
from tests.examples import at_most
from tests.scheduler.shapes import chain_routes, shapes


def run(shape: StepShape, latency_s: float = 0.04) -> tuple[Event, ...]:
    """A step whose transfers take some time, the same both ways."""
    cost = {
        Resource.COMPUTE: Cost(0.3),
        Resource.MERGE: Cost(0.01),
        Resource.LOAD: Cost(0.02),
        Resource.TO_HOST: Cost(0.03),
        Resource.TO_DEVICE: Cost(0.03),
        Resource.UPLOAD: Cost(latency_s),
        Resource.DOWNLOAD: Cost(latency_s),
    }
    return simulate(build_graph(shape), lambda task: cost[task.kind.resource]).events


def by_own_clocks(events: tuple[Event, ...], off_s: dict[tuple[int, int], float]) -> list[Event]:
    return [
        replace(e, start_s=e.start_s + off_s[e.stage, e.replica], end_s=e.end_s + off_s[e.stage, e.replica])
        for e in events
    ]


@settings(deadline=None)
@given(shapes(), st.data())
def test_no_message_is_read_before_it_is_written_whatever_the_clocks(shape: StepShape, data: st.DataObject) -> None:
    events = run(shape)
    workers = sorted({(e.stage, e.replica) for e in events})
    off_s = {worker: data.draw(st.floats(-5, 5)) for worker in workers}
    moved = aligned(by_own_clocks(events, off_s))
    written = {e.task: e.end_s for e in moved if e.lane is Resource.UPLOAD}
    for event in moved:
        if event.lane is Resource.DOWNLOAD:
            assert written[str(source_of(Task.parse(event.task)))] <= event.end_s + 1e-9
    assert sorted(e.end_s - e.start_s for e in moved) == pytest.approx(sorted(e.end_s - e.start_s for e in events))


@settings(deadline=None)
@given(shapes(), st.data())
def test_clocks_that_no_message_contradicts_are_left_alone(shape: StepShape, data: st.DataObject) -> None:
    events = run(shape)
    workers = sorted({(e.stage, e.replica) for e in events})
    off_s = {worker: data.draw(st.floats(0, 0.039)) for worker in workers}
    assert aligned(by_own_clocks(events, off_s)) == tuple(
        sorted(by_own_clocks(events, off_s), key=lambda event: (event.start_s, event.end_s))
    )


def test_messages_both_ways_find_the_difference_of_two_clocks() -> None:
    """A get ends 30 ms after its put one way and 34 ms the other, in truth; the middle is 2 ms off."""

    def event(task: str, end_s: float) -> Event:
        found = Task.parse(task)
        lane = found.kind.resource
        return Event(task=task, stage=found.stage, replica=0, lane=lane, step=0, start_s=end_s - 0.01, end_s=end_s)

    ahead_s = 7.0  # of stage 1's clock
    events = [
        event("put-activation.s0.r0.m0.k0", 1.0),
        event("get-activation.s1.r0.m0.p0.k0", 1.030 + ahead_s),
        event("put-gradient.s1.r0.m0.p0", 2.0 + ahead_s),
        event("get-gradient.s0.r0.m0.p1", 2.034),
    ]
    assert clock_corrections(events) == pytest.approx({(0, 0): 0.0, (1, 0): -ahead_s + 0.002})


@at_most(50)
@given(st.integers(2, 4), st.integers(1, 3), st.data())
def test_clocks_are_found_to_within_the_time_of_a_message(stages: int, replicas: int, data: st.DataObject) -> None:
    shape = StepShape(
        stages=stages,
        replicas=replicas,
        micro_batches=3 * replicas,
        routes=chain_routes(stages),
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
    )
    events = run(shape)
    off_s = {(s, r): data.draw(st.floats(-5, 5)) for s in range(stages) for r in range(replicas)}
    found = clock_corrections(by_own_clocks(events, off_s))
    for worker, seconds in found.items():
        if (worker[1] == 0 or replicas > 1) and any(found.values()):
            assert seconds + off_s[worker] - off_s[0, 0] == pytest.approx(0, abs=0.04 * (stages + replicas))
