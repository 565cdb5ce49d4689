"""The trials of a sweep: as many as its limits admit run side by side, each watched by a thread of its own."""

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import optuna
from optuna.trial import FrozenTrial, TrialState

from funcpipe.api import FuncPipe
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import RunLimits, ValidationReport, prices_of
from funcpipe.core.texts import error_text
from funcpipe.errors import FuncPipeError, NotFinite, RunHalted, StorageError, Superseded
from funcpipe.platforms.launch_rate import LaunchRate
from funcpipe.runstate.generations import delete_objects
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import Owner
from funcpipe.sweep.budget import Budget, Spending
from funcpipe.sweep.candidates import Candidate, Candidates
from funcpipe.sweep.study import SweepStatus, SweepStudy, TrialStatus, status_of
from funcpipe.sweep.trial_run import TrialCost, TrialRun, TrialStopped, delete_runs

_log = logging.getLogger(__name__)

Make = Callable[[optuna.Trial], FuncPipe | Candidate]
"""Makes the training of a trial, with the values that the trial suggests."""

_BATCH = 32
"""The most trials that are made ready before they start: their models are in memory."""

_LOOK_S, _SHOW_S = 0.1, 0.25
_LEAST_PAUSE_S, _LOOKS_S = 0.05, 200
"""The least pause between two looks at a trial, and the most looks at all trials in a second."""

_FAILURES = 3
"""The number of trials, none of which has finished, after whose failure the sweep ends."""


@dataclass(kw_only=True)
class _Running:
    """A trial in this process: that of Optuna, its run, and what was seen of it; `whole` if it trained to its end."""

    trial: optuna.Trial
    run: TrialRun
    prepared: PreparedRun
    values: list[float] = field(default_factory=list)
    thread: threading.Thread | None = None
    whole: bool = False

    @property
    def workers(self) -> int:
        """The number of its functions."""
        return self.prepared.job.plan.workers

    @property
    def usd_s(self) -> float:
        """The dollars of a second of its functions."""
        plan = self.prepared.job.plan
        return sum(prices_of(plan, self.prepared.job.prices).function_usd_s) * plan.replicas


class Wave:
    """Runs trials until `wanted` have begun and all have ended, or a limit is reached.

    `make` makes their models in the thread that calls `run`, one after the other. Of the runs that have ended the best
    stays in storage, or each that has finished if it `keeps_all`. `client_usd` says what clients' requests have cost.
    `show` gets the status now and then.
    """

    def __init__(
        self,
        *,
        make: Make,
        study: SweepStudy,
        candidates: Candidates,
        owner: Owner,
        sweep: Keys,
        metric: str,
        wanted: int,
        limits: RunLimits,
        client_usd: Callable[[], float],
        keeps_all: bool = False,
        show: Callable[[SweepStatus], None] | None = None,
    ) -> None:
        self._make, self._study, self._candidates, self._owner = make, study, candidates, owner
        self._sweep, self._metric, self._wanted = sweep.run, metric, wanted
        self._limits, self._client_usd = limits, client_usd
        self._keeps_all, self._show = keeps_all, show
        self._lock, self._keeping, self._changed = threading.RLock(), threading.Lock(), threading.Event()
        self._running, self._ready = list[_Running](), list[_Running]()
        self._bugs, self._failures, self._shown_s = list[BaseException](), 0, -math.inf
        self._functions, self._rate = 1, LaunchRate(None)
        self._budget, known = Budget(limits), study.trials()
        self.ended = sum(trial.state.is_finished() for trial in known)
        for trial in known:
            usd, seconds = trial.user_attrs.get("usd", 0.0), trial.user_attrs.get("seconds", 0.0)
            self._budget.ended(usd, seconds, whole=trial.state is TrialState.COMPLETE)
        self._known = deque(trial for trial in known if trial.state is TrialState.RUNNING)
        self._kept = study.best()
        stays = [self._name(trial.number) for trial in known if not self._is_left(trial)]
        delete_runs(owner.parts, sweep, "-t", but=stays)

    def first(self) -> PreparedRun | None:
        """Make the first trial ready to start, and return its run; None if no trial is left.

        Raises InputError for what cannot be trained.
        """
        while not self._ready and self._more():
            self._make_next()
        if not self._ready:
            return None
        self._budget.estimated(self._ready[0].prepared.estimate)
        return self._ready[0].prepared

    def run(self, functions: int, rate: LaunchRate) -> None:
        """Train all that the limits admit, with so many functions at once, which start no faster than the `rate`.

        At the end no function runs; interrupted trials save a step before.
        """
        self._functions, self._rate = functions, rate
        try:
            while True:
                self._stop_some()
                started = self._start_some()
                if self._bugs:
                    raise self._bugs[0]
                if not started and not self._running:
                    return
                if not started:
                    self._changed.wait(_LOOK_S)
                self._changed.clear()
                self._tell_status()
        except BaseException as error:
            self._end_all(saves=isinstance(error, KeyboardInterrupt | SystemExit))
            raise
        finally:
            with contextlib.suppress(StorageError):  # of a sweep that fails for that reason
                self._study.save(self._client_usd())
            self._shown_s = -math.inf
            self._tell_status()

    def status(self) -> SweepStatus:
        """Return all trials as they are now."""
        with self._lock:
            running = {one.trial.number: one for one in self._running}
            trials = [
                _status(one, trial)
                if (one := running.get(trial.number))
                else status_of(trial, self._name(trial.number))
                for trial in self._study.trials()
                if trial.state is not TrialState.WAITING
            ]
            usd = self._budget.ended_usd + sum(one.run.cost.usd for one in self._running)
        client_usd = self._client_usd()
        return SweepStatus(
            run=self._sweep,
            metric=self._metric,
            direction=self._study.direction,
            wanted=self._wanted,
            trials=tuple(trials),
            usd=usd + client_usd,
            client_usd=client_usd,
            elapsed_s=self._budget.elapsed_s,
            max_usd=self._limits.max_usd,
        )

    def _name(self, number: int) -> str:
        return f"{self._sweep}-t{number:04d}"

    def _is_left(self, trial: FrozenTrial) -> bool:
        """Return True if nothing of the trial, which a client before has seen end, is to stay in storage."""
        if trial.state is TrialState.COMPLETE:
            return not self._keeps_all and trial.number != self._kept
        return trial.state.is_finished()

    def _more(self) -> bool:
        begun = sum(trial.state is not TrialState.WAITING for trial in self._study.trials())
        return bool(self._known) or (begun < self._wanted and not self._study.is_exhausted)

    def _make_next(self) -> None:
        """Make the next trial ready: one that ran when its client ended, or a new one.

        Raises whatever the user's code does if no trial was ready before; later ones count as failed.
        """
        known = self._known.popleft() if self._known else None
        trial = self._study.ask() if known is None else self._study.again(known)
        try:
            made = self._make(trial)
            prepared = self._candidates.run(made, self._name(trial.number), known=known is not None)
        except optuna.TrialPruned:
            self._study.tell(trial, TrialState.PRUNED)
            return
        except Exception as error:
            if not self._candidates.any_ready:
                raise
            self._study.tell(trial, TrialState.FAIL, error=error_text(error))
            self._count_failure(error)
            return
        if known is not None:
            self._budget.ended_usd -= known.user_attrs.get("usd", 0.0)  # which its run says, too
        left_s = self._budget.left_s
        deadline_s = None if left_s is None else prepared.account.elapsed_s + left_s
        prepared = replace(prepared, limits=replace(self._limits, deadline_s=deadline_s))
        run = TrialRun(prepared, self._owner, pause_s=self._pause_s)
        self._ready.append(_Running(trial=trial, run=run, prepared=prepared))

    def _pause_s(self) -> float:
        return max(_LEAST_PAUSE_S, len(self._running) / _LOOKS_S)

    def _start_some(self) -> bool:
        """Start trials, as far as the limits admit; return False if none was."""
        ready, self._ready = self._ready, []
        if ready and not self._admits([]):
            self._ready = ready
            return False
        while len(ready) < _BATCH and self._more() and self._admits(ready):
            self._make_next()
            ready, self._ready = [*ready, *self._ready], []
        if ready:
            self._study.save(self._client_usd())
        for one in ready:
            self._rate.take(one.workers)
            with self._lock:
                self._running.append(one)
            one.thread = threading.Thread(target=self._train, args=(one,), name=one.run.name, daemon=True)
            one.thread.start()
            self._tell_status()
        return bool(ready)

    def _admits(self, ready: Sequence[_Running]) -> bool:
        """Return True if one more trial may start, beside those that run and those that are `ready`."""
        with self._lock:
            begun = [*self._running, *ready]
        workers = begun[-1].workers if begun else 1
        if begun and sum(one.workers for one in begun) + workers > self._functions:
            return False
        return self._budget.may_start([self._spending(one) for one in begun], self._client_usd())

    def _spending(self, one: _Running) -> Spending:
        """Return what a trial costs: it is expected to cost what others did, or more at the pace of its own steps."""
        cost, steps = one.run.cost, one.prepared.job.steps
        left_s = cost.seconds * (steps / cost.step - 1) if cost.step else 0.0
        expected_usd = max(self._budget.trial_usd, cost.usd + left_s * one.usd_s)
        return Spending(usd=cost.usd, expected_usd=expected_usd, usd_s=one.usd_s)

    def _stop_some(self) -> None:
        """End trials, those that were started last, for which there is no money or no time."""
        with self._lock:
            running = list(self._running)
        count = self._budget.to_stop([self._spending(one) for one in running], self._client_usd())
        for one in running[len(running) - count :]:
            one.run.stop(kept=True)

    def _train(self, one: _Running) -> None:
        """Train one trial, in a thread of its own, and note how it has ended."""
        try:
            self._end(one)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the sweep
            self._bugs.append(error)
        finally:
            with self._lock:
                self._budget.ended(one.run.cost.usd, one.run.cost.seconds, whole=one.whole)
                self._running.remove(one)
            self._changed.set()

    def _end(self, one: _Running) -> None:
        try:
            reports = one.run.train(partial(self._heard, one))
        except (TrialStopped, RunHalted) as stop:
            if isinstance(stop, TrialStopped) and not stop.kept:
                self._tell(one, TrialState.PRUNED)
                one.run.delete()
                return
            _log.info("trial %d ends early, and can go on: %s", one.trial.number, stop)
            self._study.note(one.trial, usd=one.run.cost.usd, seconds=one.run.cost.seconds)
            return
        except Superseded:
            raise  # another client has taken the sweep over
        except FuncPipeError as error:
            self._fail(one, error)
            return
        value = self._best(one.values)
        if math.isnan(value):
            self._fail(one, NotFinite(f"its {self._metric} was never a number"))
            return
        one.whole = True
        self._tell(one, TrialState.COMPLETE, value)
        self._keep_or_delete(one, reports)

    def _fail(self, one: _Running, error: FuncPipeError) -> None:
        _log.warning("trial %d has failed: %s", one.trial.number, error)
        self._tell(one, TrialState.FAIL, error=str(error))
        one.run.delete()
        if not isinstance(error, NotFinite):
            self._count_failure(error)

    def _count_failure(self, error: Exception) -> None:
        """Raise `error`, if it is one of several and no trial has finished."""
        with self._lock:
            self._failures += 1
            if self._failures >= _FAILURES and self._study.best() is None:
                raise error

    def _heard(self, one: _Running, report: ValidationReport, cost: TrialCost) -> None:
        """Note a validation; raises TrialStopped if the trial is to be pruned."""
        value = report.values.get(self._metric, math.nan)
        one.values.append(value)
        pruned = self._study.report(one.trial, value, report.step)
        self._changed.set()
        if pruned and report.step < one.prepared.job.steps and not report.stop:
            raise TrialStopped(kept=False)

    def _best(self, values: Sequence[float]) -> float:
        known = [value for value in values if not math.isnan(value)] or [math.nan]
        return min(known) if self._study.direction == "minimize" else max(known)

    def _tell(self, one: _Running, state: TrialState, value: float | None = None, *, error: str = "") -> None:
        cost, steps = one.run.cost, one.prepared.job.steps
        left = steps / cost.step - 1 if cost.step and state is TrialState.PRUNED else 0.0
        attributes = {"usd": cost.usd, "seconds": cost.seconds, "saved_usd": cost.usd * left, "error": error}
        self._study.tell(one.trial, state, value, **attributes)

    def _keep_or_delete(self, one: _Running, reports: Sequence[ValidationReport]) -> None:
        """Keep the model of the best trial, or of each; by now the study knows how the trial has ended."""
        with self._keeping:
            best = self._study.best()
            if self._keeps_all or best == one.trial.number:
                one.run.keep(reports)
                before, self._kept = self._kept, best
                if before is not None and before != best and not self._keeps_all:
                    delete_objects(self._owner.parts, self._name(before))
                return
        one.run.delete()

    def _end_all(self, *, saves: bool) -> None:
        with self._lock:
            running = list(self._running)
        for one in running:
            one.run.stop(kept=True, saves=saves)
        for one in running:
            if one.thread is not None:
                one.thread.join()

    def _tell_status(self) -> None:
        if self._show is not None and time.monotonic() - self._shown_s > _SHOW_S:
            self._show(self.status())
            self._shown_s = time.monotonic()


def _status(one: _Running, trial: FrozenTrial) -> TrialStatus:
    """Return the status of a trial that runs."""
    cost = one.run.cost
    return replace(status_of(trial, one.run.name), state="running", step=cost.step, usd=cost.usd, seconds=cost.seconds)
