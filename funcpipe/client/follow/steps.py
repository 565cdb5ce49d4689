"""Follow a run step by step to its end: polls, validations, and the limit of its cost.

Every question is a request, and no function waits for the answer: a step that is seen late costs nothing. So the pauses
between polls are about as long as steps take, and shorter only at first, as long as that is unknown.
"""

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from funcpipe.client.control.stopping import notice_of, order_end
from funcpipe.client.control.verdict import awaited_by
from funcpipe.client.follow.results import NOTHING_LEARNED, OnProgress, Progress, RunResult, collect
from funcpipe.client.follow.supervisor import POLL_S, Supervisor
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import OnDrift, RunRecord, StepReport, ValidationReport, prices_of, worker_name
from funcpipe.core.validation import is_due
from funcpipe.errors import DeadlineExceeded, ReplicasDiffer
from funcpipe.platforms.base import Storage
from funcpipe.runstate.halt import too_expensive
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import Owner
from funcpipe.runstate.reader import History, RunReader
from funcpipe.runstate.replica_marks import last_differences
from funcpipe.runstate.reports import LOSSES_READ, JoinedStep, StepReader, ValidationKeys, find_report
from funcpipe.runstate.snapshot import Snapshot
from funcpipe.runstate.validations import get_part

_log = logging.getLogger(__name__)

_Found = TypeVar("_Found")

SUPERVISE_S = 0.1
"""Pause between two polls of functions; platforms are asked no more often than they can bear."""

_FIRST_S, _LEAST_MOST_S, _MOST_S = 0.05, 0.2, 5.0
_LATE_SHARE = 0.25
"""The share of a step's time so far by which its end may be seen late."""


class StepPolls:
    """The polls until a step has ended, with pauses that depend on how long steps take, up to `heartbeat_s`."""

    def __init__(
        self,
        heartbeat_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._sleep = sleep
        self._seen_s: float | None = None
        self._steps = 0
        self._step_s = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step, as far as this client has seen steps end; 0 is unknown."""
        return self._step_s

    def now_s(self) -> float:
        """The time by the clock of the pauses."""
        return self._clock()

    def pause_s(self, waited_s: float) -> float:
        """Seconds to pause before the next poll, when the end of a step has been waited for so long."""
        most_s = min(max(self._step_s, _LEAST_MOST_S) if self._step_s else _MOST_S, _MOST_S, self._heartbeat_s)
        return min(max(_LATE_SHARE * waited_s, self._step_s / 2, _FIRST_S), most_s)

    def until(self, find: Callable[[], _Found | None], meanwhile: Callable[[], None]) -> tuple[_Found, bool]:
        """Call `find` until it finds something; return that, and True if it had to be waited for.

        `meanwhile` is called every SUPERVISE_S; an error that it raises ends the wait.
        """
        began_s, waited = self._clock(), False
        while (found := find()) is None:
            waited = True
            ends_s = self._clock() + self.pause_s(self._clock() - began_s)
            while (left_s := ends_s - self._clock()) > 0:
                meanwhile()
                self._sleep(min(left_s, SUPERVISE_S))
        return found, waited

    def step_ended(self, *, waited: bool) -> None:
        """A step was seen to have ended; only if it was `waited` for, it has ended just now."""
        self._steps += 1
        if not waited:
            return
        now_s = self._clock()
        if self._seen_s is not None:
            self._step_s = (now_s - self._seen_s) / self._steps
        self._seen_s, self._steps = now_s, 0


class Validations:
    """The reports of one run's validations, waited for when due."""

    def __init__(
        self, prepared: PreparedRun, record: RunRecord, supervisor: Supervisor, owner: Owner, polls: StepPolls
    ) -> None:
        self._prepared = prepared
        self._keys = ValidationKeys.of(record)
        self._supervisor = supervisor
        self._owner = owner
        self._polls = polls
        self._known = max((report.step for report in record.validations), default=-1)
        self._began_step = record.began_step

    def after(self, step: int) -> ValidationReport | None:
        """The report of the validation after `step` steps, once there is one; None if none is due, or it is known.

        Functions are supervised meanwhile. Raises DeadlineExceeded if no batch is measured for long.
        """
        evaluation = self._prepared.job.evaluation
        if evaluation is None or step <= self._known:
            return None
        if not is_due(step, every=evaluation.every, began_step=self._began_step):
            return None
        storage, job, faults = self._prepared.storage, self._prepared.job, self._prepared.faults
        deadline_s = job.message_deadline_s + faults.cold_start_s + faults.start_s
        until_s, seen = self._polls.now_s() + deadline_s, -1

        def supervise() -> None:
            nonlocal until_s, seen
            self._owner.check()
            self._supervisor.poll()
            if self._polls.now_s() <= until_s:
                return
            parts = len(storage.list(self._keys.prefix_of_parts(step)))
            if parts == seen:
                raise DeadlineExceeded(
                    f"run {self._keys.run}: the validation after step {step} measured no batch in {deadline_s:g} s"
                )
            until_s, seen = self._polls.now_s() + deadline_s, parts

        report, _ = self._polls.until(lambda: find_report(storage, self._keys, step), supervise)
        return report


def load_outputs(storage: Storage, keys: Keys, job: Job) -> dict[str, Tensor]:
    """The outputs of a model that predicts for all samples, in their order; empty for any other."""
    evaluation = job.evaluation
    if evaluation is None or not evaluation.keep_outputs:
        return {}
    own, rows = ValidationKeys.of(keys), list[dict[str, Tensor]]()
    for batch in evaluation.batches(job.plan):
        found: dict[str, Tensor] = {}
        for replica in range(min(job.plan.replicas, len(batch.micro_batches))):
            found |= get_part(storage, own.output(replica, batch.number))
        for number in range(len(batch.micro_batches)):
            prefix = f"{number}/"
            rows.append({name.removeprefix(prefix): t for name, t in found.items() if name.startswith(prefix)})
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def follow(
    prepared: PreparedRun, record: RunRecord, supervisor: Supervisor, on_progress: OnProgress, owner: Owner
) -> RunResult:
    """Watch the run step by step until all its workers have ended; return its result."""
    job, keys = prepared.job, Keys.of(record)
    reader = StepReader(prepared.storage, keys)
    polls, budget = StepPolls(prepared.faults.heartbeat_s), ClientBudget(prepared, keys)
    due = Validations(prepared, record, supervisor, owner, polls)
    steps, progress, ended, validations = _Steps(record), None, job.steps, list(record.validations)

    def stops_after(step: int) -> bool:
        if (report := due.after(step)) is None:
            return False
        validations.append(report)
        if progress is not None:
            on_progress(replace(progress, validation=report))
        return report.stop

    for step in range(record.first_step, job.steps):
        if stops_after(step):
            ended = step
            break
        reports, waited = await_step(prepared, reader, supervisor, step, owner, polls)
        supervisor.step_ended()
        cost_usd = supervisor.cost_usd() + supervisor.requests_usd()
        budget.keep(cost_usd, done=step + 1, step_s=polls.step_s)
        joined = JoinedStep.of(reports)
        steps.add(step, joined, waited=waited)
        progress = Progress(
            step=step + 1,
            steps=job.steps,
            loss=joined.loss,
            samples_per_s=steps.samples_per_s(),
            cost_usd=cost_usd,
            elapsed_s=supervisor.elapsed_s(),
            skipped=len(steps.skipped),
            learning_rate=joined.learning_rate,
        )
        on_progress(progress)
    else:
        stops_after(job.steps)
    supervisor.wait(job.message_deadline_s)
    compare_replicas(prepared, keys, ended)
    history = steps.history if job.plan.replicas <= LOSSES_READ else _history(prepared.storage, record, ended)
    return collect(
        RunReader(prepared.storage, record),
        job.prices,
        steps=ended,
        losses=history.losses,
        skipped_steps=history.skipped_steps,
        watched=supervisor.functions(),
        validations=tuple(validations),
        trained=None if job.epochs else NOTHING_LEARNED,
        opened=prepared.opens_result,
        outputs=load_outputs(prepared.storage, keys, job),
    )


def _history(storage: Storage, record: RunRecord, steps: int) -> History:
    """The losses of the first `steps` steps by all replicas, of a run that has ended."""
    return RunReader(Snapshot(storage), record).history(steps)


class _Steps:
    """The steps that have ended, those of earlier generations included: losses, and how fast."""

    def __init__(self, record: RunRecord) -> None:
        self.losses, self.skipped = list(record.losses), list(record.skipped_steps)
        self._replicas = record.plan.replicas
        self._samples = 0
        self._began_s: float | None = None

    def add(self, step: int, joined: JoinedStep, *, waited: bool) -> None:
        """Add `step`, which had to be `waited` for unless it ended before this client looked."""
        self.losses.append(joined.loss)
        self.skipped += [step] if joined.skipped else []
        if self._began_s is not None:
            self._samples += round(joined.samples * self._replicas / joined.replicas)
        elif waited:  # the first step that this client saw end: from here on it knows how fast the run is
            self._began_s = time.monotonic()

    @property
    def history(self) -> History:
        """The losses, and the steps that updated nothing."""
        return History(losses=tuple(self.losses), skipped_steps=tuple(self.skipped))

    def samples_per_s(self) -> float:
        """Return the samples per second of the steps that this client saw; 0 before it knows."""
        return 0.0 if self._began_s is None else self._samples / max(time.monotonic() - self._began_s, POLL_S)


class ClientBudget:
    """The limit of a run's cost, with this client's requests and downloads, before which it orders the run to end.

    Functions do so by themselves, but do not count the client's requests.
    """

    def __init__(self, prepared: PreparedRun, keys: Keys) -> None:
        self._storage, self._keys = prepared.storage, keys
        self._max_usd = prepared.limits.max_usd
        self._heartbeat_s = prepared.faults.heartbeat_s
        self._steps = prepared.job.steps
        plan = prepared.job.plan
        self._usd_s = sum(prices_of(plan, prepared.job.prices).function_usd_s) * plan.replicas
        self._usd_s += prepared.job.prices.stores_usd_h(plan.stores) / 3600
        self._collect_usd = prepared.job.prices.traffic_usd(prepared.collected_bytes)
        self._ordered = False

    def keep(self, cost_usd: float, *, done: int, step_s: float) -> None:
        """Give the order if the run, which has cost `cost_usd` for `done` steps, would exceed the limit before it ends.

        A step takes `step_s`.
        """
        notice = notice_of(self._heartbeat_s, step_s)
        if self._max_usd is None or self._ordered or done + notice >= self._steps:
            return
        if cost_usd + self._collect_usd + notice * step_s * self._usd_s > self._max_usd:
            self._ordered = True
            order_end(self._storage, self._keys, done=done, notice=notice, reason=too_expensive(self._max_usd))


def compare_replicas(prepared: PreparedRun, keys: Keys, steps: int) -> None:
    """Warn of replicas that differ at the end from the first one of their stage, which is the result."""
    if not steps:
        return
    plan = prepared.job.plan
    marks = Snapshot(prepared.storage)
    differences = last_differences(marks, keys, stages=len(plan.stages), replicas=plan.replicas, steps=steps)
    for found in differences:
        _log.warning("run %s: %s; the result is the first replica's", keys.run, found)
    if differences and prepared.faults.on_drift is OnDrift.FAIL:
        raise ReplicasDiffer(
            f"run {keys.run}: {differences[0]}; --set training.on-drift=copy would have warned, and gone on"
        )


def await_step(
    prepared: PreparedRun, reader: StepReader, supervisor: Supervisor, step: int, owner: Owner, polls: StepPolls
) -> tuple[list[StepReport], bool]:
    """The reports of `step` by the last stage's first LOSSES_READ replicas, and True if this client waited for them.

    Functions are supervised meanwhile. They know best which message has not come in time, and first have to start:
    this client gives up only some time after them.
    """
    job, keys, reports, waited = prepared.job, reader.keys, [], False
    deadline_s = job.message_deadline_s + prepared.faults.cold_start_s + prepared.faults.start_s
    for replica in range(min(job.plan.replicas, LOSSES_READ)):
        worker = worker_name(len(job.plan.stages) - 1, replica)
        until_s = polls.now_s() + deadline_s

        def supervise(worker: str = worker, until_s: float = until_s) -> None:
            owner.check()
            supervisor.poll()
            if polls.now_s() > until_s:
                awaited = awaited_by(prepared.storage, keys, worker)
                why = f"; it waits for others: {awaited}" if awaited else ""
                raise DeadlineExceeded(f"run {keys.run}: {worker} has not ended step {step} in {deadline_s:g} s{why}")

        report, late = polls.until(functools.partial(reader.find, step, worker), supervise)
        reports.append(report)
        waited = waited or late
    polls.step_ended(waited=waited)
    return reports, waited
