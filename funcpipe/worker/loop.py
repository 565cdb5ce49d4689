"""The loop of a worker: become the worker, train its stage step by step, save it, and finish, halt or hand over."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from funcpipe.core import (
    CountsByKind,
    Event,
    Events,
    Heartbeat,
    OnDrift,
    Outcome,
    RequestCounts,
    Resource,
    WorkerSpec,
)
from funcpipe.core.cached import cached_property
from funcpipe.core.start import StartPart
from funcpipe.errors import Cancelled, ReplicasDiffer, RunHalted, Superseded, TaskFailed
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import exists, put_document
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease
from funcpipe.runstate.renewal import Renewal
from funcpipe.runstate.replica_marks import instruction_set
from funcpipe.training.batches import Batches, Step
from funcpipe.training.computation import Computation
from funcpipe.worker.checkpoint_manager import CheckpointInterval, CheckpointManager
from funcpipe.worker.hand_over import Successor, await_predecessor
from funcpipe.worker.heartbeat import HaltOrders, HeartbeatThread, LimitCheck
from funcpipe.worker.peer_recovery import PeerRecovery
from funcpipe.worker.progress import TimeAccount, WorkerProgress
from funcpipe.worker.step_runner import Background, StepRunner
from funcpipe.worker.validation import Validator

_log = logging.getLogger(__name__)

TRACED_STEPS = 20
"""The number of last steps that a worker's trace holds."""

_Trace = deque[tuple[Event, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Worker:
    """One replica of one stage, and the parts that it works with; `load_worker` makes them."""

    spec: WorkerSpec
    storage: Storage
    keys: Keys
    lease: Lease
    orders: HaltOrders
    batches: Batches
    runner: StepRunner
    checkpoints: CheckpointManager
    interval: CheckpointInterval
    progress: WorkerProgress
    account: TimeAccount
    successor: Successor
    peers: PeerRecovery
    renewal: Renewal
    validator: Validator | None = None
    warm_up: Callable[[], object] = lambda: None

    @property
    def computation(self) -> Computation:
        """The computation of the stage."""
        return self.runner.computation

    @cached_property
    def limits(self) -> LimitCheck:
        """The check of the run's limits."""
        return LimitCheck(
            progress=self.progress,
            interval=self.interval,
            checkpoints=self.checkpoints,
            orders=self.orders,
            successor=self.successor,
            validator=self.validator,
            heartbeat_s=self.spec.faults.heartbeat_s,
        )

    def run(self) -> Outcome:
        """Become the worker and train from the stage's newest checkpoint on; writes the trace of the last steps.

        Raises Superseded if another function is or becomes the worker, RunHalted if the run is to end at once.
        """
        if self.spec.epochs and self._must_wait():
            with self.account.start.part(StartPart.WARM_UP):
                self.warm_up()
        with self.account.start.part(StartPart.PREDECESSOR):
            was_left = await_predecessor(self.spec, self.storage, self.keys)
        if not was_left and (reason := self.orders.poll()) is not None:
            raise RunHalted(reason)  # which the attempt before obeys, if it can: it has more to save
        if self.successor.follows:
            self.progress.budget.end_overlap(self.progress.billed_s)
        self.lease.take()
        if (reason := self.orders.poll()) is not None:
            raise RunHalted(reason)
        heartbeat = HeartbeatThread(
            self.storage,
            self.keys,
            self.lease,
            self.orders,
            describe=self._describe,
            exceeded=self.limits.exceeded,
            after_beat=self._after_beat,
            grace_s=self.limits.grace_s,
            heartbeat_s=self.spec.faults.heartbeat_s,
            cancel=self.runner.cancel,
        )
        try:
            loader = self.runner.loader or contextlib.nullcontext()
            with self.renewal, heartbeat, self.runner.threads, Background() as background, loader:
                return self._train(heartbeat, background)
        except (TaskFailed, Cancelled) as error:
            if isinstance(error.__cause__, Superseded):
                raise error.__cause__ from None
            if heartbeat.fatal_error is not None and isinstance(error.__cause__ or error, Cancelled):
                raise heartbeat.fatal_error from None
            raise

    def _must_wait(self) -> bool:
        """Return True if this worker has to wait: for its predecessor, or for workers that have not begun."""
        if self.successor.follows:
            return not exists(self.storage, self.keys.hand_over(self.spec.worker, self.spec.attempt - 1))
        if self.spec.attempt or not self.spec.stage:
            return False
        begun = {key.rpartition("/")[0] for key in self.storage.list(self.keys.all_leases)}
        return len(begun) + 1 < self.progress.workers

    def _train(self, heartbeat: HeartbeatThread, background: Background) -> Outcome:
        trace: _Trace = deque(maxlen=TRACED_STEPS)
        self._restore()
        self.account.begin(self.progress.done)
        _log.info("starts at step %d of %d", self.progress.done, self.progress.steps)
        outcome = self._run_steps(background, trace)
        events = tuple(event for step_events in trace for event in step_events)
        samples = {step: self.batches.samples_of(step) for step in sorted({event.step for event in events})}
        traced = Events(events=events, samples=samples)
        put_document(self.storage, self.keys.trace(self.spec.worker, self.spec.attempt), traced)
        heartbeat.beat_last()
        if outcome is Outcome.HANDED_OVER:  # comes last: from here on another function is the worker
            self.successor.hand_over(self.progress.done)
        return outcome

    def _run_steps(self, background: Background, trace: _Trace) -> Outcome:
        while (outcome := self._run_until_drift(background, trace)) is None:
            background.flush()
            self._restore()
            _log.warning("goes back to its stage's checkpoint after step %d", self.progress.done)
            steps_kept = [events for events in trace if all(event.step < self.progress.done for event in events)]
            trace.clear()
            trace.extend(steps_kept)
        return outcome

    def _restore(self) -> None:
        """Continue from the newest checkpoint, with what was written in the steps since."""
        self.progress.done = self.checkpoints.restore(self.runner.graphs.messages_of)
        self.runner.actions.adopt(self.checkpoints.written)

    def _run_until_drift(self, background: Background, trace: _Trace) -> Outcome | None:
        """Run steps to the end; None if this replica has other parameters than the first and must go back."""
        for step in self.batches.steps_from(self.progress.done, self.spec.epochs):
            outcome = self._end_early(background) or self._validate(background)
            if outcome is not None:
                return outcome
            began_s = time.monotonic()
            trace.append(self._run_step(step, background))
            messages = self.runner.graphs.messages_of(step.number)
            self.checkpoints.record_messages(step.number, messages)
            part = self.runner.graphs.of_step(step.number)
            self.progress.record_messages(part.own, part.others)
            self.progress.done += 1
            received_bytes = sum(event.payload_bytes for event in trace[-1] if event.lane is Resource.DOWNLOAD)
            self.interval.record_step(time.monotonic() - began_s, received_bytes, messages.most)
            self.progress.longest_step_s = self.interval.longest_step_s
            self.checkpoints.after_step(self.progress.done, background.submit)
            self.limits.after_step()
            if self._has_drifted():
                return None
        self._save_last(background)
        return self._validate(background) or Outcome.FINISHED

    def _run_step(self, step: Step, background: Background) -> tuple[Event, ...]:
        """Run `step`; its events. Where it is cut short at a limit of the run, what was done before is saved."""
        try:
            with self.account.step() as ended:
                events = self.runner.run(step, background)
                ended(events)
        except (TaskFailed, Cancelled):
            if self.limits.is_near() and self.computation.go_back():
                self._save_last(background)
            raise
        return events

    def _validate(self, background: Background) -> Outcome | None:
        """Validate if that is due; how the worker ends before it has, or because of what was found.

        What was saved after these steps is from before the validation: who restarts there begins with it.
        """
        if self.validator is None or not self.validator.is_due(self.progress.done):
            return None
        with self.account.validation():
            found = self.validator.run(
                self.progress.done, lambda batch_s, left_s: self._end_early(background, batch_s=batch_s, left_s=left_s)
            )
        if isinstance(found, Outcome):
            return found
        self.validator.keep_best(found, self.computation.state)
        if found.stop:
            _log.info("ends early: no validation was better since step %s", found.best_step)
            self._save_last(background)
            return Outcome.FINISHED
        self.computation.after_validation(found.values)
        return None

    def _has_drifted(self) -> bool:
        """Return True if the replica must go back. Raises ReplicasDiffer if the run is to end then."""
        drift = self.checkpoints.drift
        if drift is None:
            return False
        if self.spec.faults.on_drift is OnDrift.FAIL:
            raise ReplicasDiffer(f"{drift}; --set training.on-drift=copy would take them from the checkpoint instead")
        _log.warning("%s", drift)
        return self.progress.done < self.progress.steps  # the run's result is the first replica's

    def _end_early(self, background: Background, *, batch_s: float = 0.0, left_s: float = 0.0) -> Outcome | None:
        """Save the stage if the worker must end before the next step; None if it can go on.

        In a validation, before its next batch: batches take `batch_s` each, and `left_s` together.
        """
        try:
            if self.orders.end_before(self.progress.done):
                self._save_last(background)
                return Outcome.HALTED
        except RunHalted:
            if not self.limits.behind_steps:  # others are ahead, and have saved what comes later
                self._save_last(background)
                raise
        step_s, saving_s = max(self.interval.step_s, batch_s), self.interval.checkpoint_s
        last = min(self.orders.last_step or self.progress.steps, self.progress.steps)
        self.successor.start_in_time(last=last, step_s=step_s, saving_s=saving_s, left_s=left_s)
        if self.successor.must_leave(step_s=step_s, saving_s=saving_s):
            self._save_last(background, leaving=True)
            return Outcome.HANDED_OVER
        return None

    def _save_last(self, background: Background, *, leaving: bool = False) -> None:
        """Save the stage, unless it learns nothing, and wait until everything of its steps is written."""
        if not self.progress.steps:
            return
        self.checkpoints.save(self.progress.done, leaving=leaving)
        background.flush()
        self._has_drifted()
        self.checkpoints.mark_done(self.progress.done)

    def _after_beat(self) -> None:
        """Check the other workers, and, in the first worker, renew objects that storages may delete."""
        if self.spec.is_first:
            self.renewal.renew_due(self.progress.run_s)
        self.peers.check(
            self.runner.lanes.awaited_workers(self.spec.faults.heartbeat_s) - {self.spec.worker},
            step=self.progress.done,
            account=self.progress.account,
        )

    def _describe(self, beat: int) -> Heartbeat:
        counts = self.progress.requests + CountsByKind(default=RequestCounts(puts=1))
        return Heartbeat(
            worker=self.spec.worker,
            attempt=self.spec.attempt,
            beat=beat,
            step=self.progress.done,
            steps=self.progress.steps,
            alive_s=self.progress.billed_s,
            step_s=self.interval.step_s,
            memory_bytes=self.progress.peak_memory_bytes,
            memory_mb=self.spec.memory_mb,
            spent_usd=self.progress.function_usd,
            run_usd=self.progress.run_usd,
            run_s=self.progress.run_s,
            sent_at_s=self.runner.clock(),
            saved_step=self.checkpoints.newest_step,
            busy=self.runner.lanes.busy(),
            instructions=instruction_set(),
            run_requests_usd=self.progress.run_requests_usd,
            requests=counts.total,
            by_kind=counts,
            start=None if self.account.first_step is None else self.account.start.times,
            device_bytes=self.progress.peak_device_bytes,
        )
