"""Clients that follow a run which another client supervises, and stand by to take over."""

import contextlib
import functools
import itertools
import time
from dataclasses import replace

from funcpipe.client.follow.results import OnProgress, Progress
from funcpipe.client.follow.steps import StepPolls
from funcpipe.core import RunAccount, RunRecord, StepReport, worker_name
from funcpipe.errors import RunUnknown
from funcpipe.platforms.base import Storage
from funcpipe.runstate.generations import find_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.liveness import HeartbeatReader
from funcpipe.runstate.owner import BEAT_S, Ownership, OwnerWatch
from funcpipe.runstate.reader import spent_so_far
from funcpipe.runstate.reports import LOSSES_READ, JoinedStep, StepReader

_LISTED_EVERY_S = 10.0


class OncePerStep:
    """A callback that passes each step and each validation on once, although the run is followed again."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._step = 0
        self._validated = 0

    def __call__(self, progress: Progress) -> None:
        """Pass `progress` on, unless it was before."""
        if progress.step > self._step:
            self._step = progress.step
            self._on_progress(replace(progress, validation=None))
        if progress.validation is not None and progress.validation.step > self._validated:
            self._validated = progress.validation.step
            self._on_progress(progress)


def check_not_gone(storage: Storage, record: RunRecord) -> None:
    """Raise RunUnknown if the generation of `record` is gone, as another client has collected or resumed it."""
    if find_record(storage, Keys.of(record)) is None:
        raise RunUnknown(
            f"run {record.run} has ended, and another client has collected or continued it: "
            f"funcpipe run status {record.run} shows whether it goes on"
        )


def follow_as_standby(storage: Storage, record: RunRecord, on_progress: OnProgress) -> None:
    """Report steps until the client that supervises the run leaves it or dies. Raises RunUnknown when it has ended.

    Nothing is written meanwhile.
    """
    polls, reader, owner = StepPolls(BEAT_S), StepReader(storage, Keys.of(record)), _OwnerCheck(storage, record)
    spending = _Spending(storage, record)
    for step in itertools.count(record.first_step):
        with contextlib.suppress(_OwnerGone):
            reports, waited = polls.until(functools.partial(_reports, reader, record, step), owner.check)
            polls.step_ended(waited=waited)
            joined, account = JoinedStep.of(reports), spending.account()
            on_progress(
                Progress(
                    step=step + 1,
                    steps=record.steps,
                    loss=joined.loss,
                    samples_per_s=0.0,
                    cost_usd=account.spent_usd + account.requests_usd,
                    elapsed_s=account.elapsed_s,
                    learning_rate=joined.learning_rate,
                )
            )
            continue
        return


class _Spending:
    """The cost and time of a run by some of its heartbeats, listed now and then."""

    def __init__(self, storage: Storage, record: RunRecord) -> None:
        self._storage, self._record = storage, record
        self._heartbeats, self._listed_s = HeartbeatReader(storage, Keys.of(record)), -_LISTED_EVERY_S

    def account(self) -> RunAccount:
        """Return what the run has cost and taken, as its functions last said."""
        if time.monotonic() - self._listed_s >= _LISTED_EVERY_S:
            self._listed_s = time.monotonic()
            self._heartbeats.list()
            self._heartbeats.read()
        return spent_so_far(self._storage, self._record, self._heartbeats.beats.values())


class _OwnerGone(Exception):
    """The client that supervised the run is gone."""


class _OwnerCheck:
    """A check, now and then, that a run still has an owner."""

    def __init__(self, storage: Storage, record: RunRecord) -> None:
        self._storage, self._record = storage, record
        self._owner, self._checked_s = OwnerWatch(storage, record.run), -BEAT_S

    def check(self) -> None:
        """Raise _OwnerGone if no client supervises the run, RunUnknown if it has ended."""
        if time.monotonic() - self._checked_s >= BEAT_S:
            self._checked_s = time.monotonic()
            check_not_gone(self._storage, self._record)
            if self._owner.poll() is Ownership.FREE:
                raise _OwnerGone


def _reports(reader: StepReader, record: RunRecord, step: int) -> list[StepReport] | None:
    """The reports of `step` by the last stage's first LOSSES_READ replicas; None as long as one is missing."""
    if step >= record.steps:
        return None
    last = len(record.plan.stages) - 1
    found = [reader.find(step, worker_name(last, replica)) for replica in range(min(record.plan.replicas, LOSSES_READ))]
    reports = [report for report in found if report is not None]
    return reports if len(reports) == len(found) else None
