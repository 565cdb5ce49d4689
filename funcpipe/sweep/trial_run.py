"""The run of one trial: started, watched from validation to validation, ended, and kept or deleted.

A trial has no client of its own: the sweep owns it, so that nothing is asked about its owner while it runs. Its steps
are not followed either, as only validations count.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from funcpipe.client.follow.interruption import saved_if_interrupted
from funcpipe.client.follow.launch import begin, start
from funcpipe.client.follow.results import bill
from funcpipe.client.follow.supervisor import Supervisor
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import FinishedRun, JobEstimate, RunRecord, ValidationReport
from funcpipe.core.validation import is_due
from funcpipe.errors import KeyExists
from funcpipe.platforms.base import Storage
from funcpipe.runstate.finished import keep_only_model, last_checkpoint
from funcpipe.runstate.generations import delete_objects, generations_of, load_worker_specs, reserve_first
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import Owner
from funcpipe.runstate.reader import RunReader, reported_requests, spent_so_far
from funcpipe.runstate.reports import ValidationKeys, find_report, load_reports

_LATE_SHARE = 0.1
"""The share of a validation's time by which it may be seen late."""


class TrialStopped(Exception):
    """The trial is to end now: its functions are stopped. What it has saved stays if it is `kept`."""

    def __init__(self, *, kept: bool, saves: bool = False) -> None:
        super().__init__("the trial is to end")
        self.kept, self.saves = kept, saves


@dataclass(frozen=True, kw_only=True)
class TrialCost:
    """The dollars of a trial so far, for functions and their requests, and its seconds; it has done `step` steps."""

    usd: float
    seconds: float
    step: int


Heard = Callable[[ValidationReport, TrialCost], None]
"""Called with each validation; it may raise TrialStopped."""


class TrialRun:
    """A trial that runs in a thread; others may ask it to end."""

    def __init__(self, prepared: PreparedRun, owner: Owner, *, pause_s: Callable[[], float]) -> None:
        """`pause_s` is the least pause between two looks at the trial."""
        self._prepared, self._owner = prepared, owner
        self._pause_s = pause_s
        self._wake = threading.Event()
        self._stop: TrialStopped | None = None
        self._record: RunRecord | None = prepared.running
        self._has_begun = prepared.running is not None
        self._requests_usd = _requests_usd(prepared.estimate)
        self.cost = TrialCost(usd=prepared.account.spent_usd, seconds=prepared.account.elapsed_s, step=0)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self._prepared.name

    def stop(self, *, kept: bool, saves: bool = False) -> None:
        """Have the trial end soon; with `saves` after a step that is saved."""
        self._stop = self._stop or TrialStopped(kept=kept, saves=saves)
        self._wake.set()

    def train(self, heard: Heard) -> tuple[ValidationReport, ...]:
        """Train to the end, and return all validations. Raises TrialStopped, WorkerFailed or RunHalted.

        At the end, however it comes, no function runs.
        """
        self._end_if_wanted()
        prepared = self._prepared
        if prepared.has_finished:
            assert self._record is not None, "it has run"
            return self._retold(self._record, heard)
        if prepared.running is not None:
            keys = Keys.of(prepared.running)
            account = spent_so_far(self._owner.parts, prepared.running)
            prepared = replace(prepared, storage=self._owner.parts, account=account)
        else:
            prepared, keys = self._begun()
        self._has_begun = True
        with self._supervisor(prepared, keys) as supervisor:
            try:
                if prepared.running is not None:
                    supervisor.attach(load_worker_specs(prepared.storage, keys))
                else:
                    self._record = start(prepared, keys, supervisor)
                with saved_if_interrupted(prepared, keys, supervisor):
                    reports = self._watch(prepared, supervisor, heard)
            except KeyboardInterrupt:
                assert self._stop is not None, "only a stop that saves raises it here"
                raise self._stop from None
            finally:
                self._note(supervisor)
        self.cost = replace(self.cost, usd=self._billed_usd(prepared, supervisor))
        return reports

    def _begun(self) -> tuple[PreparedRun, Keys]:
        """Return the run with the storage that it is written into, and the keys of a new generation.

        Of a trial that is new there is nothing in storage, and nothing is searched for.
        """
        prepared, storage = self._prepared, self._owner.parts
        assert prepared.shared is not None, "trials share code"
        if prepared.resumed is None:
            with contextlib.suppress(KeyExists):
                return replace(prepared, storage=storage), reserve_first(storage, self.name, prepared.shared.run_key)
        return begin(prepared, storage)

    def keep(self, reports: Sequence[ValidationReport]) -> None:
        """Keep the model of a trial that has trained to its end, and delete all else."""
        assert self._record is not None, "it has run"
        storage, record = self._owner.parts, self._record
        if (reader := RunReader(storage, record)).finished is not None:
            return
        ended = reports[-1].step if reports and reports[-1].stop else record.steps
        checkpoint, size = last_checkpoint(storage, record, ended)
        history = reader.history(ended)
        prepared, requests = self._prepared, reported_requests(storage, reader.keys, reader.workers)
        finished = FinishedRun(
            losses=history.losses,
            skipped_steps=history.skipped_steps,
            bill=bill([], reader.workers, requests, prepared.job.prices, earlier_usd=record.spent_usd),
            workers=reader.workers,
            elapsed_s=self.cost.seconds,
            kept_bytes=size,
        )
        keep_only_model(storage, record, finished, checkpoint)

    def delete(self) -> None:
        """Delete all objects of the trial, which has ended; of one that has not begun there are none."""
        if self._has_begun:
            delete_objects(self._owner.parts, self.name)

    def _retold(self, record: RunRecord, heard: Heard) -> tuple[ValidationReport, ...]:
        """Return the validations of a trial that has ended while no client watched it."""
        reports = (*record.validations, *load_reports(self._owner.parts, ValidationKeys.of(record)))
        account = spent_so_far(self._owner.parts, record)
        usd, steps = account.spent_usd + account.requests_usd, record.steps
        self.cost = TrialCost(usd=usd, seconds=account.elapsed_s, step=steps)
        for report in reports:
            heard(report, replace(self.cost, step=report.step))
        return reports

    def _supervisor(self, prepared: PreparedRun, keys: Keys) -> Supervisor:
        return Supervisor(
            prepared.platform,
            prepared.storage,
            keys,
            prices=prepared.job.prices,
            stores=prepared.job.plan.stores,
            account=prepared.account,
            check_owner=self._owner.check,
        )

    def _watch(self, prepared: PreparedRun, supervisor: Supervisor, heard: Heard) -> tuple[ValidationReport, ...]:
        """Wait for all validations, and for the end of all functions."""
        record, job, storage = self._record, prepared.job, prepared.storage
        assert record is not None, "it has begun"
        assert job.evaluation is not None, "each trial is validated"
        keys, every = ValidationKeys.of(record), job.evaluation.every
        reports, known = list(record.validations), max((report.step for report in record.validations), default=-1)
        for report in reports:
            heard(report, replace(self.cost, step=report.step))
        due = [step for step in range(known + 1, job.steps + 1) if is_due(step, every=every, began_step=0)]
        seen_s = time.monotonic()
        while True:
            self._owner.check()
            left = supervisor.poll()
            while due and (found := find_report(storage, keys, due[0])) is not None:
                reports.append(found)
                self._note(supervisor, found.step)
                due, seen_s = [] if found.stop else due[1:], time.monotonic()
                heard(found, self.cost)
            if not left:
                return tuple(reports)
            self._note(supervisor)
            waited_s = time.monotonic() - seen_s
            self._wake.wait(max(self._pause_s(), min(_LATE_SHARE * waited_s, prepared.faults.heartbeat_s)))
            self._end_if_wanted()

    def _end_if_wanted(self) -> None:
        if self._stop is None:
            return
        if self._stop.saves:
            raise KeyboardInterrupt
        raise self._stop

    def _note(self, supervisor: Supervisor, step: int | None = None) -> None:
        step = self.cost.step if step is None else step
        requests_usd = max(supervisor.requests_usd(), self._requests_usd * step / self._prepared.job.steps)
        usd = supervisor.cost_usd() + requests_usd
        self.cost = TrialCost(usd=usd, seconds=supervisor.elapsed_s(), step=step)

    def _billed_usd(self, prepared: PreparedRun, supervisor: Supervisor) -> float:
        """Return the dollars of a trial that has ended, by the reports of its functions."""
        assert self._record is not None, "it has run"
        reader = RunReader(prepared.storage, self._record)
        requests = reported_requests(prepared.storage, reader.keys, reader.workers)
        made = bill(
            supervisor.functions(),
            reader.workers,
            requests,
            prepared.job.prices,
            stores=prepared.job.plan.stores,
            lasted_s=supervisor.elapsed_s() - prepared.account.elapsed_s,
            earlier_usd=self._record.spent_usd,
        )
        return made.cost_usd


def _requests_usd(estimate: JobEstimate | None) -> float:
    """Return what requests of functions are expected to cost: one that is stopped does not say how many they were."""
    return 0.0 if estimate is None else estimate.requests_usd - estimate.client.requests_usd


def delete_runs(storage: Storage, sweep: Keys, part: str, *, but: Collection[str] = ()) -> None:
    """Delete the runs of `sweep` called after it and `part`, which have ended; `but` these stay.

    They have the sweep's key, which no other run has, whatever it is called.
    """
    generations = generations_of(storage.list(f"{sweep.run}{part}"))
    for run in sorted({keys.run for keys in generations if keys.nonce == sweep.nonce} - {*but}):
        delete_objects(storage, run)
