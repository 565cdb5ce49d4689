"""What the lanes of a worker are doing: tasks are noted as they begin and end."""

import threading
import time
from collections.abc import Callable

from funcpipe.core import Busy
from funcpipe.scheduler.execute import TaskResult
from funcpipe.scheduler.tasks import Task, source_of


class LaneMonitor:
    """The tasks that are under way in one worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[Task, float] = {}

    def noting(self, run: Callable[[Task], TaskResult]) -> Callable[[Task], TaskResult]:
        """`run`, whose tasks are noted."""

        def noted(task: Task) -> TaskResult:
            with self._lock:
                self._running[task] = self._clock()
            try:
                return run(task)
            finally:
                with self._lock:
                    del self._running[task]

        return noted

    def awaited(self, least_s: float) -> frozenset[str]:
        """The workers for whose objects this one has waited that long or longer."""
        now_s = self._clock()
        with self._lock:
            gets = [task for task, began_s in self._running.items() if task.kind.is_get and now_s - began_s >= least_s]
        sources = {source_of(task) for task in gets}
        return frozenset(f"s{source.stage}.r{source.replica}" for source in sources)

    def busy(self) -> tuple[Busy, ...]:
        """What is under way, the longest first."""
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
