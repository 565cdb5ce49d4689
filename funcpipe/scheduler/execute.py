"""The executor: runs one worker's part of a task graph, with threads for each of its lanes."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from funcpipe.core import Event, Resource
from funcpipe.errors import Cancelled, TaskFailed
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.lane_rules import ORDERS, Order
from funcpipe.scheduler.tasks import Task


@dataclass(frozen=True, slots=True)
class TaskResult:
    """How many bytes a task moved, and for how long it waited for an object that did not exist yet.

    `ago_s` is there if others did its work beside the lane: how many seconds ago that began and ended.
    """

    payload_bytes: int = 0
    waited_s: float = 0.0
    ago_s: tuple[float, float] | None = None


def execute(
    graph: Graph,
    run_task: Callable[[Task], TaskResult],
    *,
    step: int,
    cancel: threading.Event,
    open_requests: int = 1,
    open_downloads: int | None = None,
    clock: Callable[[], float] = time.time,
) -> tuple[Event, ...]:
    """Run the tasks of one worker, each as soon as what it needs has ended and its lane lets it (see `lane_rules`).

    Up to `open_requests` uploads are under way at once, and as many downloads unless `open_downloads` says otherwise;
    `run_task` has to let only one body at a time move in each direction. The compute lane runs in the calling thread.
    The first failure wins: it sets `cancel`, which blocked tasks must obey, and is raised as TaskFailed once all lanes
    have stopped. If `cancel` is set from outside, Cancelled is raised. Events have the times of `clock`.
    """
    lanes = {lane.resource: positions for lane, positions in graph.lanes().items()}
    execution = _Execution(graph, run_task, step, cancel, clock)
    widths = {
        Resource.UPLOAD: open_requests,
        Resource.DOWNLOAD: open_requests if open_downloads is None else open_downloads,
        Resource.MERGE: 1,
        Resource.LOAD: 1,
    }
    threads = [
        threading.Thread(target=execution.run_lane, args=(lane,), name=f"funcpipe-{resource.value}-{number}")
        for resource, width in widths.items()
        for lane in [_Lane(lanes.get(resource, ()), ORDERS[resource])]
        for number in range(min(width, len(lanes.get(resource, ()))))
    ]
    for thread in threads:
        thread.start()
    try:
        execution.run_lane(_Lane(lanes.get(Resource.COMPUTE, ()), ORDERS[Resource.COMPUTE]))
    except BaseException:
        execution.stop()
        raise
    finally:
        for thread in threads:
            thread.join()
    if execution.failure is not None:
        task, error = execution.failure
        raise TaskFailed(str(task), error) from error
    if cancel.is_set():
        raise Cancelled("stopped from outside")
    return tuple(sorted(execution.events, key=lambda event: (event.start_s, event.end_s)))


class _Lane:
    """The tasks of a lane, by position, that no thread has taken yet."""

    def __init__(self, positions: Sequence[int], order: Order) -> None:
        self._left = list(positions)
        self._overtaking = order is Order.OVERTAKING
        self._lock = threading.Lock()

    def next(self, wait_for: Callable[[Sequence[int]], int | None]) -> int | None:
        """The next task, once it can start; None when no task is left or `wait_for` gives up."""
        with self._lock:
            if not self._left:
                return None
            position = wait_for(self._left if self._overtaking else self._left[:1])
            if position is not None:
                self._left.remove(position)
            return position


class _Execution:
    """What the lanes of one worker share: which tasks have ended, and the first failure."""

    def __init__(
        self,
        graph: Graph,
        run_task: Callable[[Task], TaskResult],
        step: int,
        cancel: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self.graph = graph
        self.run_task = run_task
        self.step = step
        self.cancel = cancel
        self.clock = clock
        self.done = [False] * len(graph.tasks)
        self.changed = threading.Condition()
        self.events: list[Event] = []
        self.failure: tuple[Task, BaseException] | None = None

    def run_lane(self, lane: _Lane) -> None:
        """Run tasks of `lane` until none is left or the step is cancelled."""
        while (position := lane.next(self._wait_for)) is not None:
            task = self.graph.tasks[position]
            start_s = self.clock()
            try:
                result = self.run_task(task)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - any failure stops all lanes; execute raises it
                self._fail(task, error)
                return
            self._finish(position, start_s, result)

    def stop(self) -> None:
        """Make every lane stop before its next task."""
        with self.changed:
            self.cancel.set()
            self.changed.notify_all()

    def _wait_for(self, positions: Sequence[int]) -> int | None:
        """The first of `positions` that can start, once one can; None if the step is cancelled."""
        with self.changed:
            self.changed.wait_for(lambda: self.cancel.is_set() or self._first_ready(positions) is not None)
            if not self.cancel.is_set():
                return self._first_ready(positions)
            self.changed.notify_all()  # whoever set it from outside has not woken the other lanes
            return None

    def _first_ready(self, positions: Sequence[int]) -> int | None:
        needs = self.graph.needs
        return next((p for p in positions if all(self.done[need] for need in needs[p])), None)

    def _fail(self, task: Task, error: BaseException) -> None:
        with self.changed:
            if self.failure is None or isinstance(self.failure[1], Cancelled):
                self.failure = (task, error)
            self.cancel.set()
            self.changed.notify_all()

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
        )
        with self.changed:
            self.events.append(event)
            self.done[position] = True
            self.changed.notify_all()
