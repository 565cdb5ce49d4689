"""The reports of a worker of the last stage on its steps, and their storage in few objects."""

import contextlib
import logging

from funcpipe.core import StepReport, StepSummary, WorkerSpec
from funcpipe.errors import KeyExists
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.step_reports import load_reported

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
