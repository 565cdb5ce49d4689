"""Runs one training step: the worker's tasks of the step, on their lanes, and what goes on beside these.

The heartbeat, and the recovery of peers, ask a `LaneMonitor` for the tasks that run. Small writes and deletions, which
no task waits for, run in the `Background`: among them the reports of the last stage on its steps.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from funcpipe.core import Busy, Event, StepReport, StepSummary, WorkerSpec, worker_name
from funcpipe.core.logs import at_step
from funcpipe.errors import KeyExists
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.reports import load_reported
from funcpipe.scheduler.execute import TaskResult, execute
from funcpipe.scheduler.tasks import Task, open_requests, source_of
from funcpipe.training.batches import Step
from funcpipe.training.computation import Computation
from funcpipe.training.loading import Loader
from funcpipe.worker.actions import Actions
from funcpipe.worker.step_graph import StepGraphs


class Background:
    """Runs functions one after the other in a thread. An error is raised by the next call, or when the context ends."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="funcpipe-background")
        self._pending: list[Future[None]] = []

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            self.flush()

    def flush(self) -> None:
        """Wait until everything that was submitted is done."""
        for future in self._pending:
            future.result()

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` after what was submitted before."""
        for future in [future for future in self._pending if future.done()]:
            self._pending.remove(future)
            future.result()
        self._pending.append(self._thread.submit(work))


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


_log = logging.getLogger(__name__)


class StepReporter:
    """Writes the report of each step and, once in half of `retained_objects` steps, a summary of all reports so far.

    After a summary it deletes the reports that the summary before holds too, and all summaries before that one. This
    takes three requests. Only one thread may use it.
    """

    def __init__(self, spec: WorkerSpec, storage: Storage, keys: Keys) -> None:
        self._worker, self._attempt = spec.worker, spec.attempt
        self._every = max(spec.faults.retained_objects // 2, 1)
        self._storage = storage
        self._keys = keys
        self._knows_all = spec.attempt == 0
        self._reports: dict[int, StepReport] = {}
        self._singles: set[int] = set()
        self._newest = ""
        self._held: frozenset[int] = frozenset()

    def write(self, report: StepReport) -> None:
        """Write `report`, unless it is there already, and a summary if one is due.

        That depends on the number of the step alone, so that attempts with few steps each write summaries too.
        """
        if report.step in self._reports:
            return
        with contextlib.suppress(KeyExists):
            key = self._keys.step_report(report.step, self._worker)
            put_document(self._storage, key, report, if_absent=True)
        self._reports[report.step] = report
        self._singles.add(report.step)
        if (report.step + 1) % self._every == 0:
            self._summarise()

    def _summarise(self) -> None:
        if not self._knows_all:
            self._take_over()
        key = self._keys.step_summary(self._worker, self._attempt, max(self._reports) + 1)
        put_document(self._storage, key, StepSummary.of(self._reports.values()))
        held_twice = self._singles & self._held
        outdated = [
            *(self._keys.step_report(step, self._worker) for step in sorted(held_twice)),
            *(other for other in self._storage.list(self._keys.step_summaries(self._worker)) if other < self._newest),
        ]
        self._storage.delete_many(outdated)
        _log.debug("wrote a summary of %d steps, deleted %d objects", len(self._reports), len(outdated))
        self._singles -= held_twice
        self._newest, self._held = key, frozenset(self._reports)

    def _take_over(self) -> None:
        """Learn what attempts before have reported; what they have written counts."""
        before = load_reported(self._storage, self._keys, self._worker, known=self._reports)
        self._reports |= before.reports
        self._singles |= before.singles
        self._newest, self._held = before.newest, before.held
        self._knows_all = True


@dataclass(frozen=True, kw_only=True)
class StepRunner:
    """Runs the steps of one worker. `loader` loads its micro-batches, if its stage reads data."""

    spec: WorkerSpec
    graphs: StepGraphs
    computation: Computation
    actions: Actions
    lanes: LaneMonitor
    threads: ThreadPoolExecutor
    reporter: StepReporter
    loader: Loader | None
    cancel: threading.Event
    clock: Callable[[], float]

    def run(self, step: Step, background: Background) -> tuple[Event, ...]:
        """Run `step`; its events. The last stage reports its loss. Raises TaskFailed or Cancelled."""
        at_step(step.number)
        began_s = time.monotonic()
        is_loaded = self.loader is not None and self.loader.begin_step(step.number)
        self.actions.begin_step(step)
        events = execute(
            self.graphs.of_step(step.number, is_loaded=is_loaded, goes_on=self.actions.goes_on).graph,
            self.lanes.watched(self.actions.run),
            step=step.number,
            cancel=self.cancel,
            threads=self.threads,
            attempt=self.spec.attempt,
            open_requests=open_requests(self.spec.plan.replicas),
            clock=self.clock,
        )
        if self.spec.stage == len(self.spec.plan.stages) - 1:
            passes = self.computation.passes
            report = StepReport(
                step=step.number,
                samples=passes.samples,
                loss_sum=passes.loss_sum,
                skipped=self.computation.norm.skipped,
                learning_rate=self.computation.learning_rate,
            )
            background.submit(lambda: self.reporter.write(report))
        _log.debug("ran %d tasks in %.3f s", len(events), time.monotonic() - began_s)
        return events
