"""Random graphs with random durations: the executor and the simulator take the tasks of each lane in the same order.

The executor runs one worker for real, on its threads, but no time passes: its tasks end in the order in which they end
in the simulation, and none ends before the executor has started all that the simulation allows by then.
"""

import random
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import Resource
from funcpipe.errors import TaskFailed
from funcpipe.scheduler.execute import TaskResult, execute, lane_threads
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.simulator.costs import Cost
from funcpipe.scheduler.simulator.simulate import simulate
from funcpipe.scheduler.tasks import GETS, ORDERS, PUTS, SIDE_BY_SIDE, Kind, Lane, Order, Task, open_requests
from tests.examples import at_most
from tests.scheduler.shapes import shapes


class Replay:
    """Ends the tasks of one worker in the order of `ends`, once all have started that `expected` says.

    `expected` holds for each task how many tasks of the worker have ended when it may start.
    """

    def __init__(self, ends: list[Task], expected: Mapping[Task, int], patience_s: float) -> None:
        self._rank = {task: rank for rank, task in enumerate(ends)}
        self._may_start = [{t for t, ended in expected.items() if ended <= rank} for rank in range(len(ends))]
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._ended = 0
        self.started: dict[Task, int] = {}

    def run(self, task: Task) -> TaskResult:
        """Start now; end when it is this task's turn."""
        rank = self._rank[task]
        with self._changed:
            self.started[task] = self._ended
            self._changed.notify_all()
            turn = self._changed.wait_for(
                lambda: self._ended == rank and self._may_start[rank] <= self.started.keys(), self._patience_s
            )
            assert turn, f"not started: {sorted(map(str, self._may_start[rank] - self.started.keys()))}"
            self._ended += 1
            self._changed.notify_all()
        return TaskResult()


def moments(graph: Graph, worker: tuple[int, int], seed: int, replicas: int) -> tuple[list[Task], dict[Task, int]]:
    """From a simulation of `graph`: the tasks of `worker` in the order of their ends, and when each may start.

    What may start is started at once on strict lanes, and in `openings` on others. Transfers then wait for their lane,
    and gets for their object, which in the executor happens after their start.
    """
    draw = random.Random(seed)
    trace = simulate(graph, lambda task: Cost(draw.uniform(0.1, 1), draw.uniform(0.1, 1), 1.0))
    found = {Task.parse(event.task): event for event in trace.events}
    part = graph.of_worker(*worker)
    ends = sorted(part.tasks, key=lambda task: found[task].end_s)
    ends_s = [found[task].end_s for task in ends]
    asked_s = openings(part, {task: found[task].end_s for task in part.tasks}, replicas)
    may_start = {}
    for task in part.tasks:
        start_s = asked_s.get(task, found[task].start_s)
        if task.kind in SIDE_BY_SIDE and task.kind.is_put:
            assert found[task].start_s == start_s
        assert found[task].start_s >= start_s
        may_start[task] = bisect_right(ends_s, start_s)
    return ends, may_start


def openings(part: Graph, ends_s: Mapping[Task, float], replicas: int) -> dict[Task, float]:
    """When a worker whose tasks end at `ends_s` asks for its transfers: for the first put that may start if fewer than
    four are open, for the next get if there is room for it.
    """
    ready_s = {
        task: max((ends_s[part.tasks[need]] for need in needs), default=0.0)
        for task, needs in zip(part.tasks, part.needs, strict=True)
    }
    asked_s: dict[Task, float] = {}
    for now_s in sorted({0.0, *ends_s.values()}):
        for kinds, most in ((PUTS, 4), (GETS, 4 * replicas)):
            for task in (task for task in part.tasks if task.kind in kinds and task not in asked_s):
                is_open = [other.kind in kinds and ends_s[other] > now_s for other in asked_s]
                if sum(is_open) < most and ready_s[task] <= now_s:
                    asked_s[task] = now_s
                elif kinds is GETS:
                    break
    return asked_s


@at_most(40)
@given(shapes(), st.integers(0, 2**32), st.data())
def test_the_executor_starts_each_task_when_the_simulator_may(shape: StepShape, seed: int, data: st.DataObject) -> None:
    graph = build_graph(shape)
    worker = data.draw(st.sampled_from(sorted({(task.stage, task.replica) for task in graph.tasks})))
    ends, may_start = moments(graph, worker, seed, shape.replicas)
    replay = Replay(ends, may_start, patience_s=60)
    with lane_threads() as threads:
        part, cancel, limits = graph.of_worker(*worker), threading.Event(), open_requests(shape.replicas)
        execute(part, replay.run, step=0, cancel=cancel, threads=threads, open_requests=limits)
    assert replay.started == may_start
    executed, simulated = by_lane(replay.started, graph), by_lane(may_start, graph)
    assert executed == simulated
    for lane, tasks in executed.items():
        if ORDERS[lane.resource] is not Order.OVERTAKING:
            assert tasks == [task for task in graph.tasks if task.lane == lane]


def by_lane(started: Mapping[Task, int], graph: Graph) -> dict[Lane, list[Task]]:
    """The tasks of each lane in the order of their starts; those that start together in the order of the graph."""
    position = {task: i for i, task in enumerate(graph.tasks)}
    lanes = defaultdict(list)
    for task in sorted(started, key=lambda task: (started[task], position[task])):
        lanes[task.lane].append(task)
    return dict(lanes)


def test_an_executor_that_holds_a_task_back_is_found_out() -> None:
    """The replay expects an upload to overtake the one before it; on a strict lane it could not."""
    tasks = (Task(Kind.FORWARD, 0, 0, 0), Task(Kind.FORWARD, 0, 0, 1))
    replay = Replay([tasks[1], tasks[0]], dict.fromkeys(tasks, 0), patience_s=0.01)
    graph, cancel = Graph(tasks, ((), ())), threading.Event()
    with lane_threads() as threads, pytest.raises(TaskFailed, match=r"not started: \['forward.s0.r0.m1'\]"):
        execute(graph, replay.run, step=0, cancel=cancel, threads=threads, open_requests=open_requests(1))


def test_every_lane_has_an_order_and_only_transfers_are_side_by_side() -> None:
    assert ORDERS.keys() == set(Resource)
    assert all(ORDERS[kind.resource] is not Order.STRICT for kind in SIDE_BY_SIDE)
