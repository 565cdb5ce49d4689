"""Clients that see how far a run comes which another client looks after."""

import contextlib
import functools
import itertools
import time
from dataclasses import replace

from funcpipe.client.polling import StepPolls
from funcpipe.client.results import OnProgress, Progress
from funcpipe.core import RunRecord, StepReport, worker_name
from funcpipe.errors import RunUnknown
from funcpipe.platforms.base import Storage
from funcpipe.runstate.generations import find_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import BEAT_S, Ownership, OwnerWatch
from funcpipe.runstate.spending import spent_so_far
from funcpipe.runstate.step_reports import StepReader


class OnlyOnce:
    """Tells of each step once, and of each validation, although the run is followed again."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._step = 0
        self._validated = 0

    def __call__(self, progress: Progress) -> None:
        """Tell of `progress`, unless it is known."""
        if progress.step > self._step:
            self._step = progress.step
            self._on_progress(replace(progress, validation=None))
        if progress.validation is not None and progress.validation.step > self._validated:
            self._validated = progress.validation.step
            self._on_progress(progress)


def still_there(storage: Storage, record: RunRecord) -> None:
    """Raise RunUnknown if the generation of `record` is gone, as another client has collected or resumed it."""
    if find_record(storage, Keys.of(record)) is None:
        raise RunUnknown(
            f"run {record.run} has ended, and another client has collected or continued it: "
            f"funcpipe status {record.run} shows whether it goes on"
        )


def look_on(storage: Storage, record: RunRecord, on_progress: OnProgress) -> None:
    """Tell of steps until the client that looks after the run leaves it or dies. Raises RunUnknown when it has ended.

    Nothing is written meanwhile.
    """
    losses, polls = list(record.losses), StepPolls(BEAT_S)
    reader, owner = StepReader(storage, Keys.of(record)), _OwnerLook(storage, record)
    for step in itertools.count(record.first_step):
        with contextlib.suppress(_OwnerGone):
            reports, waited = polls.until(functools.partial(_reports, reader, record, step), owner.look)
            polls.step_ended(waited=waited)
            losses.append(sum(report.loss_sum for report in reports) / sum(report.samples for report in reports))
            account = spent_so_far(storage, record)
            on_progress(
                Progress(
                    step=step + 1,
                    steps=record.steps,
                    loss=losses[-1],
                    samples_per_s=0.0,
                    cost_usd=account.spent_usd + account.requests_usd,
                    elapsed_s=account.elapsed_s,
                    learning_rate=reports[0].learning_rate,
                )
            )
            continue
        return


class _OwnerGone(Exception):
    """The client that looked after the run does so no more."""


class _OwnerLook:
    """Looks now and then whether a run is still looked after."""

    def __init__(self, storage: Storage, record: RunRecord) -> None:
        self._storage, self._record = storage, record
        self._sight, self._looked_s = OwnerWatch(storage, record.run), -BEAT_S

    def look(self) -> None:
        """Raise _OwnerGone if nobody looks after the run, RunUnknown if it has ended."""
        if time.monotonic() - self._looked_s >= BEAT_S:
            self._looked_s = time.monotonic()
            still_there(self._storage, self._record)
            if self._sight.poll() is Ownership.FREE:
                raise _OwnerGone


def _reports(reader: StepReader, record: RunRecord, step: int) -> list[StepReport] | None:
    """What all replicas of the last stage report of `step`; None as long as one has not."""
    if step >= record.steps:
        return None
    last = len(record.plan.stages) - 1
    found = [reader.find(step, worker_name(last, replica)) for replica in range(record.plan.replicas)]
    reports = [report for report in found if report is not None]
    return reports if len(reports) == len(found) else None
