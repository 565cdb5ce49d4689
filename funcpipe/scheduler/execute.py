"""A task graph for real: one worker's tasks on its three lanes."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from funcpipe.core import Event, Resource
from funcpipe.errors import Cancelled, TaskFailed
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.tasks import Task


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What a task moved, and for how long what it awaited did not exist yet."""

    payload_bytes: int = 0
    waited_s: float = 0.0


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
    """Run the tasks of one worker: each lane takes its own in order, each as soon as what it needs is done.

    On the upload and the download lane, up to `open_requests` tasks (`open_downloads`, if given, of the latter) are
    under way at once; what they move is kept apart below, by a gate through which one body passes at a time. The upload
    lane passes over tasks that cannot begin yet, as nothing that it writes waits for other workers. The compute lane
    runs in the calling thread. The first failure wins: it sets `cancel`, on which blocked tasks must give up, and is
    raised as TaskFailed once all lanes have stopped. Events are in the seconds of `clock`.
    """
    lanes = {lane.resource: positions for lane, positions in graph.lanes().items()}
    execution = _Execution(graph, run_task, step, cancel, clock)
    widths = {
        Resource.UPLOAD: open_requests,
        Resource.DOWNLOAD: open_requests if open_downloads is None else open_downloads,
        Resource.MERGE: 1,
    }
    threads = [
        threading.Thread(target=execution.run_lane, args=(lane,), name=f"funcpipe-{resource.value}-{number}")
        for resource, width in widths.items()
        for lane in [_Lane(lanes.get(resource, ()), in_order=resource is not Resource.UPLOAD)]
        for number in range(min(width, len(lanes.get(resource, ()))))
    ]
    for thread in threads:
        thread.start()
    try:
        execution.run_lane(_Lane(lanes.get(Resource.COMPUTE, ())))
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
    """The tasks of a lane, by position, that are left to be handed out to the threads that work on it."""

    def __init__(self, positions: Sequence[int], *, in_order: bool = True) -> None:
        self._left = list(positions)
        self._in_order = in_order
        self._lock = threading.Lock()

    def next(self, wait_for: Callable[[Sequence[int]], int | None]) -> int | None:
        """The next task once it can begin; None when there is none, or waiting for it was given up.

        In order, none behind it is handed out before; else the first that can begin.
        """
        with self._lock:
            if not self._left:
                return None
            position = wait_for(self._left[:1] if self._in_order else self._left)
            if position is not None:
                self._left.remove(position)
            return position


class _Execution:
    """What the lanes of one worker share: which tasks are done, and the first failure."""

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

    def run_lane(self, lane: "_Lane") -> None:
        while (position := lane.next(self._wait_for)) is not None:
            task = self.graph.tasks[position]
            start_s = self.clock()
            try:
                outcome = self.run_task(task)
            except Exception as error:  # noqa: BLE001 - any failure of a task stops all lanes, and is raised by execute
                self._fail(task, error)
                return
            self._finish(position, start_s, outcome)

    def stop(self) -> None:
        """Make every lane stop before its next task."""
        with self.changed:
            self.cancel.set()
            self.changed.notify_all()

    def _wait_for(self, positions: Sequence[int]) -> int | None:
        """The first of `positions` that can begin, once one can; None if the step is cancelled."""
        with self.changed:
            self.changed.wait_for(lambda: self.cancel.is_set() or self._first_ready(positions) is not None)
            if not self.cancel.is_set():
                return self._first_ready(positions)
            self.changed.notify_all()  # where it was set from outside, nobody else has told the other lanes
            return None

    def _first_ready(self, positions: Sequence[int]) -> int | None:
        needs = self.graph.needs
        return next((p for p in positions if all(self.done[need] for need in needs[p])), None)

    def _fail(self, task: Task, error: Exception) -> None:
        with self.changed:
            if self.failure is None or isinstance(self.failure[1], Cancelled):
                self.failure = (task, error)
            self.cancel.set()
            self.changed.notify_all()

    def _finish(self, position: int, start_s: float, outcome: TaskResult) -> None:
        task = self.graph.tasks[position]
        event = Event(
            task=str(task),
            stage=task.stage,
            replica=task.replica,
            lane=task.kind.resource,
            step=self.step,
            start_s=start_s,
            end_s=max(self.clock(), start_s),
            payload_bytes=outcome.payload_bytes,
            waited_s=outcome.waited_s,
        )
        with self.changed:
            self.events.append(event)
            self.done[position] = True
            self.changed.notify_all()
