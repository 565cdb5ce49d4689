"""What a worker holds at most, whatever the speeds: as many micro-batches as the schedule says, and two gradients."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funcpipe.core import Event, Resource, ScheduleKind, Sync
from funcpipe.scheduler.graph import StepShape, build_graph
from funcpipe.scheduler.pipeline import BUFFERS, ON_HOST, RECEIVES, SENDS, in_flight
from funcpipe.scheduler.simulator.costs import Cost
from funcpipe.scheduler.simulator.simulate import simulate
from funcpipe.scheduler.tasks import Kind, Task, copy_of
from tests.scheduler.shapes import chain_routes, drawn, shapes


def most_at_once(events: list[Event], taken: Kind, freed: Kind) -> int:
    """The most micro-batches for which a task of the one kind has started and the last that frees it has not ended."""
    starts: dict[int | None, float] = {}
    ends: dict[int | None, float] = {}
    for event in events:
        task = Task.parse(event.task)
        if task.kind is taken:
            starts[task.micro_batch] = min(starts.get(task.micro_batch, event.start_s), event.start_s)
        elif task.kind is freed:
            ends[task.micro_batch] = max(ends.get(task.micro_batch, event.end_s), event.end_s)
    moments = [(end_s, -1) for m, end_s in ends.items() if m in starts]
    moments += [(start_s, 1) for m, start_s in starts.items() if m in ends]
    return max(itertools.accumulate(change for _, change in sorted(moments)), default=0)


def most_on_host(events: list[Event], link: Resource) -> int:
    """The most messages between the start of a get and the end of its copy, or of a copy and the end of its put."""
    times = {Task.parse(event.task): (event.start_s, event.end_s) for event in events}
    moments = []
    for transfer, over in times.items():
        if transfer.kind in RECEIVES | SENDS and transfer.kind.resource is link and copy_of(transfer) in times:
            copied = times[copy_of(transfer)]
            first, last = (over, copied) if transfer.kind.is_get else (copied, over)
            moments += [(first[0], 1), (last[1], -1)]
    return max(itertools.accumulate(change for _, change in sorted(moments)), default=0)


def random_cost(task: Task, seed: int) -> Cost:
    """Some lanes are a hundred times faster than others, so that receives run as far ahead as they may."""
    fast = drawn(seed, task.stage, task.replica, task.kind.resource) < 0.5
    return Cost((0.01 if fast else 1.0) * (0.5 + drawn(seed, str(task))))


@settings(deadline=None)
@given(shapes(), st.integers(0, 2**32))
def test_receives_and_sends_stay_within_their_bounds_whatever_the_speeds(shape: StepShape, seed: int) -> None:
    trace = simulate(build_graph(shape), lambda task: random_cost(task, seed))
    mine = Counter(m % shape.replicas for m in range(shape.micro_batches))
    for stage in range(shape.stages):
        for replica in range(shape.replicas):
            events = [e for e in trace.events if (e.stage, e.replica) == (stage, replica)]
            held = in_flight(shape.schedule, stage=stage, stages=shape.stages, micro_batches=mine[replica])
            copies = stage in shape.accelerated
            assert most_at_once(events, Kind.FORWARD, Kind.BACKWARD) <= held
            received = Kind.ACTIVATION_TO_DEVICE if copies else Kind.GET_ACTIVATION
            assert most_at_once(events, received, Kind.BACKWARD) <= held + 1
            received = Kind.GRADIENT_TO_DEVICE if copies else Kind.GET_GRADIENT
            assert most_at_once(events, received, Kind.BACKWARD) <= BUFFERS
            assert (
                most_at_once(events, Kind.BACKWARD, Kind.GRADIENT_TO_HOST if copies else Kind.PUT_GRADIENT) <= BUFFERS
            )
            assert max(most_on_host(events, Resource.DOWNLOAD), most_on_host(events, Resource.UPLOAD)) <= ON_HOST


@pytest.mark.parametrize("schedule", ScheduleKind)
def test_a_slow_stage_is_not_flooded(schedule: ScheduleKind) -> None:
    """The last of two stages is slow; without bounds it would receive all eight micro-batches at once."""
    shape = StepShape(
        stages=2, replicas=1, micro_batches=8, routes=chain_routes(2), schedule=schedule, sync=Sync.PIPELINED
    )
    trace = simulate(build_graph(shape), lambda task: Cost(1.0 if task.stage else 0.01))
    last = [event for event in trace.events if event.stage == 1]
    expected = {ScheduleKind.GPIPE: 8, ScheduleKind.ONE_F_ONE_B: 2, ScheduleKind.EAGER_ONE_F_ONE_B: 2}
    assert most_at_once(last, Kind.GET_ACTIVATION, Kind.BACKWARD) == expected[schedule]
