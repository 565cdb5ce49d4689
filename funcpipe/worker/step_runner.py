"""Runs one training step: the worker's tasks of the step, on their lanes."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from funcpipe.comm.collectives import open_downloads
from funcpipe.core import Event, StepReport, WorkerSpec
from funcpipe.core.logs import at_step
from funcpipe.scheduler.execute import execute
from funcpipe.training.batches import Step
from funcpipe.training.computation import Computation
from funcpipe.training.loading import Loader
from funcpipe.worker.actions import Actions
from funcpipe.worker.background import Background
from funcpipe.worker.lane_monitor import LaneMonitor
from funcpipe.worker.step_graph import StepGraphs
from funcpipe.worker.step_reporter import StepReporter

_log = logging.getLogger(__name__)

OPEN_UPLOADS = 4
"""The number of uploads that may be open at once; only one of them moves its body, the others wait for their turn."""


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
            self.graphs.of_step(step.number, is_loaded=is_loaded).graph,
            self.lanes.watched(self.actions.run),
            step=step.number,
            cancel=self.cancel,
            threads=self.threads,
            attempt=self.spec.attempt,
            open_requests=OPEN_UPLOADS,
            open_downloads=open_downloads(self.spec.plan.replicas),
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
