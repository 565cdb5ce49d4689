"""The reports of steps and of validations, which the last stage's replicas write.

Of steps, the newest report of a replica is one object, all others are in summaries. Each summary holds the reports of
all steps of the generation up to its own. The two newest are kept, and so is the object of a step until both hold it:
no single object that is lost takes a loss with it. Of validations:

RUN/gNNNN/validations/STEP                  the report, which is written once and never changes
RUN/gNNNN/scores/STEP/WORKER/BATCH          what a replica of the last stage has measured in a batch
RUN/XXX/gNNNN/messages/WORKER.eval/STEP.BATCH/…
                                            messages between stages, until the batch is measured
RUN/gNNNN/best/sN/…                         checkpoints of the best model, without the optimiser's state
"""

import contextlib
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from funcpipe.core import StepReport, StepSummary, ValidationReport
from funcpipe.errors import CorruptMessage, KeyExists, KeyMissing
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import (
    find_document,
    find_readable_document,
    get_document,
    get_listed_document,
    put_document,
    readable_documents,
)
from funcpipe.runstate.keys import Keys

_log = logging.getLogger(__name__)

LOSSES_READ = 8
"""The replicas of the last stage whose losses a client reads after each step; those of more, once the run has ended."""

SUMMARY_POLLS = 16
"""A client that waits for a step lists summaries once in so many polls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedStep:
    """A step by the reports of so many replicas: its mean loss, NaN without samples.

    `learning_rate` is that of the optimiser's first parameter group; `skipped` says that the step updated nothing.
    """

    loss: float
    samples: int
    skipped: bool
    learning_rate: float | None
    replicas: int

    @classmethod
    def of(cls, reports: Sequence[StepReport]) -> "JoinedStep":
        """Join the reports of one step by replicas of the last stage."""
        samples = sum(report.samples for report in reports)
        return cls(
            loss=sum(report.loss_sum for report in reports) / samples if samples else math.nan,
            samples=samples,
            skipped=any(report.skipped for report in reports),
            learning_rate=next((report.learning_rate for report in reports if report.learning_rate is not None), None),
            replicas=len(reports),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedSteps:
    """The reports of a worker, by step, as far as they can be read.

    `newest` is the key of its newest readable summary, empty if there is none, and `held` the steps in that summary.
    `singles` are the steps with an object of their own.
    """

    reports: Mapping[int, StepReport]
    newest: str
    held: frozenset[int]
    singles: frozenset[int]


def load_reported(storage: Storage, keys: Keys, worker: str, *, known: Collection[int] = frozenset()) -> ReportedSteps:
    """Return the reports of all attempts of `worker`. The objects of steps that are `known` are not read."""
    prefix = keys.step_summaries(worker)
    summaries = storage.list(prefix)
    while True:  # again if an attempt before has put another summary meanwhile, and deleted what that holds
        found = _load(storage, keys, worker, summaries, known)
        before, summaries = summaries, storage.list(prefix)
        if summaries == before:
            return found


def _load(
    storage: Storage, keys: Keys, worker: str, summaries: Collection[str], known: Collection[int]
) -> ReportedSteps:
    reports: dict[int, StepReport] = {}
    newest, held = "", frozenset[int]()
    for key in sorted(summaries, reverse=True):
        for summary in readable_documents(storage, StepSummary, [key]):
            reports = summary.reports() | reports
            newest, held = (newest, held) if newest else (key, frozenset(reports))
    names = [key.removeprefix(keys.step_reports).partition(".") for key in storage.list(keys.step_reports)]
    singles = frozenset(int(step) for step, _, of in names if of == worker)
    wanted = sorted(singles - reports.keys() - set(known))
    own = readable_documents(storage, StepReport, [keys.step_report(step, worker) for step in wanted])
    reports |= {report.step: report for report in own}
    return ReportedSteps(reports=reports, newest=newest, held=held, singles=singles)


class StepReader:
    """Finds the reports of steps for a client that follows a run. A poll is one request, but one in SUMMARY_POLLS."""

    def __init__(self, storage: Storage, keys: Keys) -> None:
        self.keys = keys
        self._storage = storage
        self._polls_to_summary = 0
        self._listed: tuple[str, ...] = ()
        self._reports: dict[str, dict[int, StepReport]] = {}

    def find(self, step: int, worker: str) -> StepReport | None:
        """Return `worker`'s report of `step`; None if it has not ended the step, or the report is not found yet.

        Raises CorruptMessage if the report is damaged wherever it is found.
        """
        known = self._reports.setdefault(worker, {})
        if step in known:
            return known[step]
        report = find_document(self._storage, StepReport, self.keys.step_report(step, worker))
        if report is not None:
            return report
        if self._polls_to_summary == 0:
            self._listed = self._storage.list(self.keys.all_step_summaries)
            self._polls_to_summary = SUMMARY_POLLS
        self._polls_to_summary -= 1
        self._read_summaries(step, worker)
        return known.get(step)

    def _read_summaries(self, step: int, worker: str) -> None:
        """Read the newest summary that `step` may be in and that can be read; none is read again."""
        known, prefix, damage = self._reports[worker], self.keys.step_summaries(worker), None
        for key in sorted((key for key in self._listed if key.startswith(prefix)), reverse=True):
            if int(key.rpartition(".")[2]) <= step or step in known:
                continue
            self._listed = tuple(other for other in self._listed if other != key)
            try:
                summary = get_document(self._storage, StepSummary, key)
            except KeyMissing:  # deleted since it was listed, as there are newer ones
                self._polls_to_summary = 0
            except CorruptMessage as error:
                _log.warning("does without a summary that cannot be read: %s", error)
                damage = error
            else:
                known.update(summary.reports() | known)
        if damage is not None and step not in known:
            raise damage


class ValidationKeys(Keys):
    """The keys of what a generation's validations leave."""

    __slots__ = ()

    def report(self, step: int) -> str:
        """Return the key of the report of the validation after `step` steps."""
        return self._key("validations", f"{step:08d}")

    @property
    def reports(self) -> str:
        """The prefix of all reports."""
        return self._folder("validations")

    def part(self, step: int, worker: str, batch: int) -> str:
        """Return the key of `worker`'s measurements in a batch of the validation after `step` steps."""
        return self._key("scores", f"{step:08d}", worker, f"{batch:08d}")

    def parts(self, step: int, worker: str) -> str:
        """Return the prefix of all parts of `worker` in a validation."""
        return self._folder("scores", f"{step:08d}", worker)

    @property
    def all_parts(self) -> str:
        """The prefix of the parts of all validations."""
        return self._folder("scores")

    def prefix_of_parts(self, step: int) -> str:
        """Return the prefix of all parts of a validation."""
        return self._folder("scores", f"{step:08d}")

    def batch_message(self, worker: str, step: int, batch: int, task: str) -> str:
        """The object that `task` of `worker` writes in a batch of the validation after `step` steps."""
        return self._message(worker, f"{worker}.eval", f"{step:08d}.{batch:08d}", task)

    def batch_messages(self, worker: str) -> str:
        """Return the prefix of all messages of `worker` in validations."""
        return f"{self._message(worker, f'{worker}.eval')}/"

    def output(self, replica: int, batch: int) -> str:
        """Return the key of the model's outputs for the samples of `replica` in a batch."""
        return self._key("outputs", f"{batch:08d}.r{replica}")

    @property
    def best(self) -> "BestKeys":
        """The keys of the checkpoints of the best model."""
        return BestKeys(self.run, self.generation, self.nonce)


class BestKeys(Keys):
    """The keys of a generation, with the best model in place of checkpoints: no worker restarts from it."""

    __slots__ = ()

    def checkpoint(self, stage: int, name: str) -> str:
        """Return the key of a file of a checkpoint of the best model's `stage`."""
        return self._key("best", f"s{stage}", name)

    @property
    def checkpoints(self) -> str:
        """The prefix of all files of the best models."""
        return self._folder("best")


def find_report(storage: Storage, keys: ValidationKeys, step: int) -> ValidationReport | None:
    """Return the report of the validation after `step` steps, if there is one."""
    return find_document(storage, ValidationReport, keys.report(step))


def put_report(storage: Storage, keys: ValidationKeys, report: ValidationReport) -> ValidationReport:
    """Write `report`, unless there is one of its step; the one that counts."""
    with contextlib.suppress(KeyExists):
        put_document(storage, keys.report(report.step), report, if_absent=True)
    return get_document(storage, ValidationReport, keys.report(report.step))


def load_reports(storage: Storage, keys: ValidationKeys) -> tuple[ValidationReport, ...]:
    """Return all reports of the generation, in the order of their steps."""
    found = sorted(storage.list(keys.reports))
    return tuple(get_listed_document(storage, ValidationReport, key) for key in found)


def newest_report(storage: Storage, keys: ValidationKeys) -> ValidationReport | None:
    """Return the report of the newest validation of the generation, if there is one that can be read."""
    newest = max(storage.list(keys.reports), default=None)
    return None if newest is None else find_readable_document(storage, ValidationReport, newest)
