"""One function's life: become a worker, train its stage step by step on three lanes, save it, leave or hand over."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.comm.collectives import open_downloads, pattern
from funcpipe.core import Event, Events, Heartbeat, Outcome, Resource, StepReport, WorkerSpec, from_text
from funcpipe.errors import Cancelled, RunHalted, Superseded, TaskFailed
from funcpipe.model.split import StageModule
from funcpipe.platforms import allocator
from funcpipe.platforms.base import Platform, Storage
from funcpipe.platforms.wrappers import Counted
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Fenced, Lease
from funcpipe.runstate.limits import RunAccount
from funcpipe.scheduler.execute import execute
from funcpipe.training.computation import Batch, Computation
from funcpipe.training.data import Batches, Step, load
from funcpipe.training.rng import Reseeded
from funcpipe.training.stage_job import load_bundle
from funcpipe.worker.actions import Actions
from funcpipe.worker.background import Background
from funcpipe.worker.checkpoint_interval import CheckpointInterval
from funcpipe.worker.checkpoint_manager import CheckpointManager, Written
from funcpipe.worker.exit_report import ExitReport
from funcpipe.worker.hand_over import Successor, await_predecessor
from funcpipe.worker.heartbeat import HeartbeatThread, peak_memory_bytes
from funcpipe.worker.lane_monitor import LaneMonitor
from funcpipe.worker.peer_recovery import PeerRecovery
from funcpipe.worker.work_order import WorkOrder, work_order

OPEN_REQUESTS = 4
"""How many uploads wait for their turn at once, while the body of one moves."""

TRACED_STEPS = 20
"""How many of the last steps a worker's trace holds."""


def main(payload: str, *, open_storage: Callable[[str], Storage], open_platform: Callable[[str], Platform]) -> None:
    """What every function runs: `payload` is the JSON of a WorkerSpec. Ends with exit code 1 after a failure."""
    spec = from_text(WorkerSpec, payload, source="the invocation payload")
    allocator.settle()
    torch.set_num_threads(1)
    if not live(spec, Counted(open_storage(spec.storage)), open_platform):
        raise SystemExit(1)


def live(
    spec: WorkerSpec,
    storage: Counted,
    open_platform: Callable[[str], Platform],
    *,
    clock: Callable[[], float] = time.time,
) -> bool:
    """Be the worker of `spec`, and report how that ended; whether it ended well.

    Whoever is superseded says nothing: the worker is somebody else. What is reported is in the seconds of `clock`.
    """
    last_words = ExitReport(spec, storage, clock)
    outcome, failure = Outcome.FAILED, None
    try:
        outcome = Worker(spec, storage, open_platform, clock=clock).run()
    except Superseded:
        return True
    except RunHalted:
        outcome = Outcome.HALTED
    except Exception as error:  # noqa: BLE001 - whatever ends a function early is reported to its client
        failure = error
    last_words.say(outcome, failure)
    return failure is None


class Worker:
    """One replica of one stage, at work on the tasks of its lanes."""

    def __init__(
        self,
        spec: WorkerSpec,
        storage: Storage,
        open_platform: Callable[[str], Platform],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._spec = spec
        self._keys = Keys(spec.run, spec.generation)
        self._lease = Lease(storage, self._keys, spec.worker, spec.attempt, fresh_s=spec.life.lease_s)
        self._storage = Fenced(storage, self._lease)
        self._successor = Successor(spec, self._storage, self._keys, open_platform, time.monotonic())
        self._peers = PeerRecovery(spec, self._storage, self._keys, open_platform)
        self._pace = CheckpointInterval(spec.life, replicas=spec.plan.replicas)
        self._limits = RunAccount(spec.life)
        self._activity = LaneMonitor()
        self._done = spec.first_step
        self._cancel = threading.Event()
        began_s = time.monotonic()
        stage, self._job = load_bundle(spec, storage)
        self._pace.checkpoint_took(time.monotonic() - began_s)  # about as long, until one is written
        self._dataset = self._job.dataset() if self._job.dataset is not None else None
        self.computation = self._computation(stage)
        channel = Channel(self._storage, ArrivalEstimator(deadline_s=spec.message_deadline_s), cancel=self._cancel)
        self._actions = Actions(self.computation, channel, self._keys, self._job.routes, spec.plan, spec.replica)
        self._batches = Batches(
            samples=self._job.samples,
            global_batch=spec.plan.global_batch,
            micro_batch=spec.plan.micro_batch,
            seed=spec.seed,
            shuffle=self._job.shuffle,
        )
        self._keeper = CheckpointManager(
            spec,
            self._storage,
            self._keys,
            lease=self._lease,
            computation=self.computation,
            pace=self._pace,
            steps=self.steps,
        )

    @property
    def steps(self) -> int:
        """Training steps of all epochs."""
        return self._spec.epochs * self._batches.steps_per_epoch

    def run(self) -> Outcome:
        """Become the worker, and train from the stage's newest checkpoint on; leaves the events of the last steps.

        Raises Superseded when somebody else is or becomes the worker, RunHalted when the run is to end at once.
        """
        await_predecessor(self._spec, self._storage, self._keys)
        self._lease.take()
        heart = HeartbeatThread(
            self._storage,
            self._keys,
            self._lease,
            describe=self._heartbeat,
            exceeded=lambda: self._limits.exceeded(self._successor.age_s),
            look_around=self._look_after_peers,
            heartbeat_s=self._spec.life.heartbeat_s,
            cancel=self._cancel,
        )
        events: deque[tuple[Event, ...]] = deque(maxlen=TRACED_STEPS)
        try:
            with heart, Background(self._storage) as background:
                self._done = self._keeper.restore(self._written_in)
                outcome = self._live(heart, background, events)
                self._leave_trace([event for step_events in events for event in step_events])
                heart.beat_last()
                if outcome is Outcome.HANDED_OVER:  # the last word: from here on the worker is somebody else
                    self._successor.leave(self._done)
        except (TaskFailed, Cancelled) as error:
            if isinstance(error.__cause__, Superseded):
                raise error.__cause__ from None
            if heart.verdict is not None and isinstance(error.__cause__ or error, Cancelled):
                raise heart.verdict from None
            raise
        return outcome

    def _live(self, heart: HeartbeatThread, background: Background, events: deque[tuple[Event, ...]]) -> Outcome:
        for step in self._steps_left():
            if (end := self._end_early(heart, background)) is not None:
                return end
            began_s = time.monotonic()
            events.append(self._train(step, background))
            self._done += 1
            received = sum(e.payload_bytes for e in events[-1] if e.lane is Resource.DOWNLOAD)
            self._pace.step_took(time.monotonic() - began_s, received)
            self._keeper.keep(self._done, background.run)
            self._look_ahead(heart)
        self._save_last(background)
        return Outcome.FINISHED

    def _save_last(self, background: Background, *, leaving: bool = False) -> None:
        """Save the stage, and leave nothing of its steps unwritten."""
        self._keeper.save(self._done, leaving=leaving)
        background.flush()
        self._keeper.mark(self._done)

    def _end_early(self, heart: HeartbeatThread, background: Background) -> Outcome | None:
        """End before the work is done, where that is due; the stage is saved first."""
        if heart.obey(self._done):
            self._save_last(background)
            return Outcome.HALTED
        if self._successor.due(step_s=self._pace.step_s, leaving_s=self._pace.checkpoint_s):
            self._save_last(background, leaving=True)
            return Outcome.HANDED_OVER
        return None

    def _look_ahead(self, heart: HeartbeatThread) -> None:
        """Start the successor, or order the run to end, in time."""
        age_s, step_s, ending_s = self._successor.age_s, self._pace.step_s, self._pace.checkpoint_s
        self._successor.prepare(step_s=step_s, leaving_s=ending_s, spent_usd=self._limits.spent_usd(age_s))
        order = self._limits.order(step=self._done, steps=self.steps, age_s=age_s, step_s=step_s, end_s=ending_s)
        if order is not None:
            heart.order(order)

    def _train(self, step: Step, background: Background) -> tuple[Event, ...]:
        order = self._work_order(len(step.micro_batches))
        self._actions.begin(step, lambda indices: self._load(indices, step.epoch))
        events = execute(
            order.graph,
            self._activity.noting(self._actions.run),
            step=step.number,
            cancel=self._cancel,
            open_requests=OPEN_REQUESTS,
            open_downloads=open_downloads(self._spec.plan.replicas),
            clock=self._clock,
        )
        if self._spec.stage == len(self._spec.plan.stages) - 1:
            report = StepReport(step=step.number, samples=self.computation.samples, loss_sum=self.computation.loss_sum)
            background.put(self._keys.step_report(step.number, self._spec.worker), report)
        self._keeper.wrote(step.number, self._written_in(step.number))
        return tuple(replace(event, attempt=self._spec.attempt) for event in events)

    def _steps_left(self) -> Iterator[Step]:
        per_epoch = self._batches.steps_per_epoch
        for epoch in range(self._done // per_epoch, self._spec.epochs):
            yield from (step for step in self._batches.epoch(epoch) if step.number >= self._done)

    @lru_cache(maxsize=32)  # noqa: B019 - a worker lives as long as its process, or is one of few in a test
    def _work_order(self, micro_batches: int) -> WorkOrder:
        norms = self.computation.norm.decides
        return work_order(self._spec, self._job.routes, norms=norms, micro_batches=micro_batches)

    def _written_in(self, step: int) -> Written:
        first = step % self._batches.steps_per_epoch * self._spec.plan.global_batch
        samples = min(self._spec.plan.global_batch, self._job.samples - first)
        order = self._work_order(-(-samples // self._spec.plan.micro_batch))
        keys = {self._keys.message(self._spec.worker, step, str(put)): by for put, by in order.readers.items()}
        return keys, order.heard

    def _leave_trace(self, events: Sequence[Event]) -> None:
        key = self._keys.trace(self._spec.worker, self._spec.attempt)
        put_document(self._storage, key, Events(events=tuple(events)))

    def _load(self, indices: Sequence[int], epoch: int) -> Batch:
        assert self._dataset is not None, "a stage that reads data has a dataset"
        loaded = load(Reseeded(self._dataset, self._spec.seed, epoch), indices)
        return self._job.signature.bind(loaded.args, loaded.kwargs), loaded.target

    def _computation(self, stage: StageModule) -> Computation:
        spec = self._spec
        return Computation(
            stage,
            loss=self._job.loss,
            optimizer=self._job.optimizer,
            seed=spec.seed,
            recompute=spec.plan.stages[spec.stage].recompute,
            replica=spec.replica,
            replicas=spec.plan.replicas,
            number=spec.stage,
            ties=self._job.routes.ties,
            norm=self._job.norm(spec.plan),
            shards=pattern(spec.plan.sync, spec.plan.replicas, spec.plan.streams) if spec.plan.is_sharded else None,
        )

    def _look_after_peers(self) -> None:
        age_s, life = self._successor.age_s, self._spec.life
        self._peers.look(
            self._activity.awaited(life.heartbeat_s) - {self._spec.worker},
            step=self._done,
            spent_usd=self._limits.spent_usd(age_s),
            elapsed_s=life.elapsed_s + age_s,
        )

    def _heartbeat(self, beat: int) -> Heartbeat:
        age_s = self._successor.age_s
        return Heartbeat(
            worker=self._spec.worker,
            attempt=self._spec.attempt,
            beat=beat,
            step=self._done,
            steps=self.steps,
            alive_s=age_s,
            step_s=self._pace.step_s,
            memory_bytes=peak_memory_bytes(),
            memory_mb=self._spec.plan.stages[self._spec.stage].memory_mb,
            spent_usd=age_s * self._spec.life.usd_s,
            run_usd=self._limits.spent_usd(age_s),
            run_s=self._spec.life.elapsed_s + age_s,
            sent_at_s=self._clock(),
            saved_step=max(self._keeper.saved, self._keeper.marked),
            busy=self._activity.busy(),
        )
