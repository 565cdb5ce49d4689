"""The executor: runs one worker's part of a task graph, with threads for each of its lanes."""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from funcpipe.core import Event, Resource
from funcpipe.errors import Cancelled, TaskFailed
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.tasks import ORDERS, Order, Task


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The bytes that a task moved, and the time that it waited for an object that did not exist yet.

    `ago_s` is there if others did its work beside the lane: how many seconds ago that began and ended.
    """

    payload_bytes: int = 0
    waited_s: float = 0.0
    ago_s: tuple[float, float] | None = None


def lane_threads() -> ThreadPoolExecutor:
    """Threads for the lanes of one worker, kept from step to step.

    There are as many as lanes at once: a lane that waited for a thread could keep the others waiting for ever.
    """
    return ThreadPoolExecutor(sys.maxsize, thread_name_prefix="funcpipe-lane")


def execute(
    graph: Graph,
    run_task: Callable[[Task], TaskResult],
    *,
    step: int,
    cancel: threading.Event,
    threads: ThreadPoolExecutor,
    open_requests: Mapping[Resource, int],
    attempt: int = 0,
    clock: Callable[[], float] = time.time,
) -> tuple[Event, ...]:
    """Run the tasks of one worker, each as soon as what it needs has ended and its lane lets it (see `tasks.Order`).

    As many uploads and downloads are under way at once as `open_requests` says; `run_task` has to let only one body at
    a time move in each direction. The compute lane runs in the calling thread, the others in `threads`, of
    `lane_threads`.
    The first failure wins: it sets `cancel`, which blocked tasks must obey, and is raised as TaskFailed once all lanes
    have stopped. If `cancel` is set from outside, Cancelled is raised. Events have the times of `clock`.
    """
    execution = _Execution(graph, run_task, step, attempt, cancel, clock)
    beside = [
        threads.submit(execution.run_lane, lane)
        for resource, lane in execution.lanes.items()
        if resource is not Resource.COMPUTE
        for _ in range(min(open_requests.get(resource, 1), len(lane.left)))
    ]
    try:
        execution.run_lane(execution.lanes[Resource.COMPUTE])
    finally:
        wait(beside)
    for lane in beside:
        lane.result()
    if execution.failure is not None:
        task, error = execution.failure
        raise TaskFailed(str(task), error) from error
    if cancel.is_set():
        raise Cancelled("stopped from outside")
    return tuple(sorted(execution.events, key=lambda event: (event.start_s, event.end_s)))


class _Lane:
    """The tasks of a lane, by position, that no thread has taken yet."""

    def __init__(self, order: Order, positions: Sequence[int], lock: threading.Lock) -> None:
        self.left = list(positions)
        self.turn = threading.Lock()  # of its threads, one at a time waits for the lane's next task
        self.may_start = threading.Condition(lock)
        self._overtaking = order is Order.OVERTAKING

    @property
    def candidates(self) -> Sequence[int]:
        """The tasks of which the first that may start is next."""
        return self.left if self._overtaking else self.left[:1]


class _Execution:
    """The shared state of one worker's lanes: the tasks that have ended, and the first failure."""

    def __init__(
        self,
        graph: Graph,
        run_task: Callable[[Task], TaskResult],
        step: int,
        attempt: int,
        cancel: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self.graph = graph
        self.run_task = run_task
        self.step = step
        self.attempt = attempt
        self.cancel = cancel
        self.clock = clock
        self.done = [False] * len(graph.tasks)
        self.events: list[Event] = []
        self.failure: tuple[Task, BaseException] | None = None
        self._lock = threading.Lock()
        positions = {lane.resource: positions for lane, positions in graph.lanes().items()}
        self.lanes = {resource: _Lane(ORDERS[resource], positions.get(resource, ()), self._lock) for resource in ORDERS}

    def run_lane(self, lane: _Lane) -> None:
        """Run tasks of `lane` until none is left or the step is cancelled; what interrupts it cancels the step."""
        try:
            while (position := self._next(lane)) is not None:
                self._run(position)
        except BaseException:
            with self._lock:
                self._stop()
            raise

    def _run(self, position: int) -> None:
        task, start_s = self.graph.tasks[position], self.clock()
        try:
            result = self.run_task(task)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any failure stops all lanes; execute raises it
            self._fail(task, error)
        else:
            self._finish(position, start_s, result)

    def _next(self, lane: _Lane) -> int | None:
        """Take the next task of `lane`, once it may start; None when none is left or the step is cancelled."""
        with lane.turn, self._lock:
            while lane.left and not self.cancel.is_set():
                position = self._first_ready(lane)
                if position is not None:
                    lane.left.remove(position)
                    return position
                lane.may_start.wait()
            if lane.left:
                self._stop()  # if it was set from outside, the other lanes still sleep
            return None

    def _first_ready(self, lane: _Lane) -> int | None:
        needs = self.graph.needs
        for position in lane.candidates:
            if all(self.done[need] for need in needs[position]):
                return position
        return None

    def _fail(self, task: Task, error: BaseException) -> None:
        with self._lock:
            if self.failure is None or isinstance(self.failure[1], Cancelled):
                self.failure = (task, error)
            self._stop()

    def _stop(self) -> None:
        """Make every lane stop before its next task; the caller holds the lock."""
        self.cancel.set()
        for lane in self.lanes.values():
            lane.may_start.notify_all()

    def _finish(self, position: int, start_s: float, result: TaskResult) -> None:
        task, end_s = self.graph.tasks[position], self.clock()
        if result.ago_s is not None:
            start_s, end_s = end_s - result.ago_s[0], end_s - result.ago_s[1]
        event = Event(
            task=str(task),
            stage=task.stage,
            replica=task.replica,
            lane=task.kind.resource,
            step=self.step,
            start_s=start_s,
            end_s=max(end_s, start_s),
            payload_bytes=result.payload_bytes,
            waited_s=result.waited_s,
            attempt=self.attempt,
        )
        with self._lock:
            self.events.append(event)
            self.done[position] = True
            for lane in self.lanes.values():
                if self._first_ready(lane) is not None:
                    lane.may_start.notify()
