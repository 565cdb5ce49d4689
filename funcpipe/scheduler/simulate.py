"""A task graph on a virtual clock."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from funcpipe.core import Event, Resource, Source, Trace
from funcpipe.errors import PlanError
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.tasks import Lane, Task


@dataclass(frozen=True, slots=True)
class Cost:
    """What a task takes: seconds of its lane, and the bytes that it moves."""

    seconds: float
    payload_bytes: int = 0


def simulate(
    graph: Graph,
    cost: Callable[[Task], Cost],
    *,
    shared_cores: int | None = None,
    run: str = "simulation",
    step: int = 0,
) -> Trace:
    """Play `graph`: a task starts when all it needs has ended and its lane has ended the task before.

    With `shared_cores`, at most that many processors serve the computing tasks of all workers, in equal shares. Raises
    PlanError when tasks wait for each other.
    """
    return _Simulation(graph, cost, shared_cores).play(run, step)


class _Simulation:
    """The state of one play: what is running until when, and what still waits for what."""

    def __init__(self, graph: Graph, cost: Callable[[Task], Cost], shared_cores: int | None) -> None:
        self.graph = graph
        self.costs = [cost(task) for task in graph.tasks]
        self.cores = shared_cores
        self.open_needs = [len(needs) for needs in graph.needs]
        self.needed_by: list[list[int]] = [[] for _ in graph.tasks]
        for position, needs in enumerate(graph.needs):
            for need in needs:
                self.needed_by[need].append(position)
        self.lanes = {lane: list(reversed(positions)) for lane, positions in graph.lanes().items()}
        self.busy: set[Lane] = set()
        self.now_s = 0.0
        self.starts_s = [0.0] * len(graph.tasks)
        self.timed: list[tuple[float, int]] = []  # heap of (end, task): tasks that have their lane to themselves
        self.shared: list[tuple[float, int]] = []  # heap of (end in shared seconds, task): those that share processors
        self.shared_s = 0.0  # how far one task that has been computing all along would have come
        self.events: list[Event] = []

    def play(self, run: str, step: int) -> Trace:
        for lane in self.lanes:
            self._start_next(lane)
        while self.timed or self.shared:
            position = self._advance()
            task = self.graph.tasks[position]
            self.events.append(self._event(position, step))
            self.busy.discard(task.lane)
            for waiting in self.needed_by[position]:
                self.open_needs[waiting] -= 1
                if not self.open_needs[waiting]:
                    self._start_next(self.graph.tasks[waiting].lane)
            self._start_next(task.lane)
        if len(self.events) < len(self.graph.tasks):
            stuck = [str(self.graph.tasks[positions[-1]]) for positions in self.lanes.values() if positions]
            raise PlanError(f"the task graph cannot end; at the heads of its lanes wait {', '.join(stuck)}")
        self.events.sort(key=lambda event: (event.start_s, event.end_s))
        return Trace(run=run, source=Source.SIMULATED, events=tuple(self.events))

    def _start_next(self, lane: Lane) -> None:
        waiting = self.lanes[lane]
        if lane in self.busy or not waiting or self.open_needs[waiting[-1]]:
            return
        position = waiting.pop()
        self.busy.add(lane)
        self.starts_s[position] = self.now_s
        seconds = self.costs[position].seconds
        if self.cores is not None and lane.resource is Resource.COMPUTE and seconds > 0:
            heapq.heappush(self.shared, (self.shared_s + seconds, position))
        else:
            heapq.heappush(self.timed, (self.now_s + seconds, position))

    def _advance(self) -> int:
        """Move the clock to the next end of a task; return the task."""
        speed = min(1.0, self.cores / len(self.shared)) if self.shared and self.cores else 1.0
        shared_end_s = self.now_s + (self.shared[0][0] - self.shared_s) / speed if self.shared else float("inf")
        if self.timed and self.timed[0][0] <= shared_end_s:
            end_s, position = heapq.heappop(self.timed)
        else:
            end_s, position = shared_end_s, heapq.heappop(self.shared)[1]
        if self.shared or end_s == shared_end_s:
            self.shared_s += (end_s - self.now_s) * speed
        self.now_s = end_s
        return position

    def _event(self, position: int, step: int) -> Event:
        task = self.graph.tasks[position]
        return Event(
            task=str(task),
            stage=task.stage,
            replica=task.replica,
            lane=task.kind.resource,
            step=step,
            start_s=self.starts_s[position],
            end_s=self.now_s,
            payload_bytes=self.costs[position].payload_bytes,
        )
