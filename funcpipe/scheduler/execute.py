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
class Outcome:
    """What a task moved, and for how long what it awaited did not exist yet."""

    payload_bytes: int = 0
    waited_s: float = 0.0


def execute(
    graph: Graph,
    run_task: Callable[[Task], Outcome],
    *,
    step: int,
    cancel: threading.Event,
    open_requests: int = 1,
    clock: Callable[[], float] = time.time,
) -> tuple[Event, ...]:
    """Run the tasks of one worker: each lane takes its own in order, each as soon as what it needs is done.

    On the upload and the download lane, up to `open_requests` tasks that follow each other are under way at once; what
    they move is kept apart below, by a gate through which one body passes at a time. The compute lane runs in the
    calling thread. The first failure wins: it sets `cancel`, on which blocked tasks must give up, and is raised as
    TaskFailed once all lanes have stopped. Events are in the seconds of `clock`.
    """
    lanes = {lane.resource: positions for lane, positions in graph.lanes().items()}
    execution = _Execution(graph, run_task, step, cancel, clock)
    threads = [
        threading.Thread(target=execution.run_lane, args=(lane,), name=f"funcpipe-{resource.value}-{number}")
        for resource in (Resource.UPLOAD, Resource.DOWNLOAD)
        for lane in [_Lane(lanes.get(resource, ()))]
        for number in range(min(open_requests, len(lanes.get(resource, ()))))
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
    """The tasks of a lane, handed out in order to the threads that work on it."""

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = iter(positions)
        self._lock = threading.Lock()

    def next(self, wait_for: Callable[[int], bool]) -> int | None:
        """The next task, by position, once it can begin; None when there is none, or waiting for it was given up.

        Tasks behind it are not handed out before.
        """
        with self._lock:
            position = next(self._positions, None)
            return position if position is not None and wait_for(position) else None


class _Execution:
    """What the lanes of one worker share: which tasks are done, and the first failure."""

    def __init__(
        self,
        graph: Graph,
        run_task: Callable[[Task], Outcome],
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

    def _wait_for(self, position: int) -> bool:
        needs = self.graph.needs[position]
        with self.changed:
            self.changed.wait_for(lambda: self.cancel.is_set() or all(self.done[need] for need in needs))
            if not self.cancel.is_set():
                return True
            self.changed.notify_all()  # where it was set from outside, nobody else has told the other lanes
            return False

    def _fail(self, task: Task, error: Exception) -> None:
        with self.changed:
            if self.failure is None or isinstance(self.failure[1], Cancelled):
                self.failure = (task, error)
            self.cancel.set()
            self.changed.notify_all()

    def _finish(self, position: int, start_s: float, outcome: Outcome) -> None:
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
