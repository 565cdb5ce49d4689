"""The tasks that a worker's lanes are running, for its heartbeat and the recovery of peers."""

import threading
import time
from collections.abc import Callable

from funcpipe.core import Busy, worker_name
from funcpipe.scheduler.execute import TaskResult
from funcpipe.scheduler.tasks import Task, source_of


class LaneMonitor:
    """The tasks that one worker is running, and since when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[Task, float] = {}

    def watched(self, run: Callable[[Task], TaskResult]) -> Callable[[Task], TaskResult]:
        """Return a function that does what `run` does, and whose tasks are known here while they run."""

        def run_watched(task: Task) -> TaskResult:
            with self._lock:
                self._running[task] = self._clock()
            try:
                return run(task)
            finally:
                with self._lock:
                    del self._running[task]

        return run_watched

    def awaited_workers(self, min_s: float) -> frozenset[str]:
        """Return the names of the workers for whose messages this worker has waited `min_s` seconds or longer."""
        now_s = self._clock()
        with self._lock:
            gets = [task for task, began_s in self._running.items() if task.kind.is_get and now_s - began_s >= min_s]
        sources = {source_of(task) for task in gets}
        return frozenset(worker_name(source.stage, source.replica) for source in sources)

    def busy(self) -> tuple[Busy, ...]:
        """Return the running tasks, in order of their start."""
        now_s = self._clock()
        with self._lock:
            running = sorted(self._running.items(), key=lambda item: item[1])
        return tuple(
            Busy(
                lane=task.kind.resource.value,
                task=str(task),
                since_s=now_s - began_s,
                awaits=str(source_of(task)) if task.kind.is_get else None,
            )
            for task, began_s in running
        )
