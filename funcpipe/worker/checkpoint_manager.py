"""The times at which a worker saves its stage, its restoring after a restart, and its deletions from storage.

The interval of a stage's checkpoints follows from measured times of steps and checkpoints and the assumed rate of
failures: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974; J. T.
Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006, equation 37.

Where failures are rare, that interval is so long that messages, which stay until a checkpoint covers them, pile up in
the storage. So it is shortened to what `retained_bytes` and `retained_objects` allow. The number of objects is a matter
of order, not of correctness: for it checkpoints may take `COST_SHARE` of the time, and no more. All that comes with a
checkpoint counts, in each worker: the seconds for which its steps stop, as for the write, and the processor time of
what is done beside them: reading back, marks, looking for those of others, deletions. Requests that are waited for
beside the steps cost nothing.
"""

import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median, median_low

from funcpipe.core import FaultTolerance, ReplicaMark, WorkerSpec, checks
from funcpipe.errors import CorruptMessage
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoint_index import CheckpointPart
from funcpipe.runstate.checkpoints import Checkpoints, UnpublishedCheckpoint
from funcpipe.runstate.generations import touch_saved_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease
from funcpipe.runstate.replica_marks import Difference, compare, digest_of, instruction_set
from funcpipe.scheduler.tasks import Task
from funcpipe.training.computation import Computation
from funcpipe.training.sharding import without_model
from funcpipe.worker.step_graph import MessageGC, StepMessages

_log = logging.getLogger(__name__)

_MEASURED_STEPS = 8

_MEASURED_CHECKPOINTS = 5

_MAX_STEPS = 1 << 20

_SHORTEST_STEP_S = 1e-6

COST_SHARE = 0.02
"""The share of time that checkpoints may take to keep the number of objects small."""

LATE_STEPS = 4
"""The steps after a checkpoint is due by which readers have saved theirs, and its messages are deleted."""


def daly_s(*, checkpoint_s: float, failure_interval_s: float) -> float:
    """Return seconds of work between two checkpoints that lose the least time, if a checkpoint takes `checkpoint_s`."""
    checks.positive("failure_interval_s", failure_interval_s)
    if checkpoint_s >= 2 * failure_interval_s:
        return failure_interval_s
    ratio = checkpoint_s / (2 * failure_interval_s)
    young_s = math.sqrt(2 * checkpoint_s * failure_interval_s)
    return young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


class CheckpointInterval:
    """Measures a worker's steps and checkpoints, and chooses the interval of its stage's checkpoints.

    `checkpoint_s` is the time in which the last one was written; before the first, an estimate that its user sets.
    """

    def __init__(self, faults: FaultTolerance, *, replicas: int, longest_step_s: float = 0.0) -> None:
        """A stage of several `replicas` fails as often as all of them together.

        Before this worker has done a step, the longest one took `longest_step_s`.
        """
        self._faults = faults
        self._longest_step_s = longest_step_s
        self._failure_interval_s = faults.failure_interval_s / replicas
        self._steps_s: deque[float] = deque(maxlen=_MEASURED_STEPS)
        self._received_bytes: deque[int] = deque(maxlen=_MEASURED_STEPS)
        self._costs_s: deque[float] = deque(maxlen=_MEASURED_CHECKPOINTS)
        self._lock = threading.Lock()  # costs are recorded in the background too
        self._objects = 0
        self._last_steps = 0
        self.checkpoint_s = 0.0

    def record_step(self, seconds: float, received_bytes: int, objects: int = 0) -> None:
        """Record the time of a step, the bytes of the messages that it received, and what it left.

        `objects` is the number of messages that any worker puts in such a step, at most.
        """
        self._steps_s.append(seconds)
        self._received_bytes.append(received_bytes)
        self._objects = objects

    def begin_checkpoint(self) -> None:
        """From now on, costs are those of another checkpoint."""
        with self._lock:
            self._costs_s.append(0.0)

    def record_cost(self, seconds: float) -> None:
        """Record what this worker has spent on the checkpoint that began last; before the first, it does not count."""
        with self._lock:
            if self._costs_s:
                self._costs_s[-1] += seconds

    @property
    def step_s(self) -> float:
        """The median time of the last steps; 0 before the first."""
        return median(self._steps_s) if self._steps_s else 0.0

    @property
    def longest_step_s(self) -> float:
        """The longest time of the last steps."""
        return max(self._steps_s, default=self._longest_step_s)

    def steps(self) -> int:
        """The number of steps between two checkpoints: the user's, or a power of two, so that stages coincide."""
        if self._faults.checkpoint_steps is not None:
            return self._faults.checkpoint_steps
        if not self._steps_s:
            return 1
        best_s = daly_s(checkpoint_s=self.checkpoint_s, failure_interval_s=self._failure_interval_s)
        by_time = best_s / max(self.step_s, _SHORTEST_STEP_S)
        by_bytes = self._faults.retained_bytes / max(median(self._received_bytes), 1)
        wanted = 1 << max(round(math.log2(max(min(by_time, by_bytes, _MAX_STEPS), 1.0))), 0)
        steps = min(wanted, self._steps_for_objects())
        if steps != self._last_steps:
            _log.debug("checkpoints every %d steps, for steps of %.3f s", steps, self.step_s)
            self._last_steps = steps
        return steps

    def _steps_for_objects(self) -> int:
        """The power of two at which so few objects are kept, unless more steps are needed to pay for a checkpoint.

        Until this worker has measured two checkpoints, as the first one may be slow, the objects alone count.
        """
        allowed = self._faults.retained_objects / max(self._objects, 1) - LATE_STEPS
        few = 1 << math.floor(math.log2(min(max(allowed, 1.0), _MAX_STEPS)))
        with self._lock:
            costs_s = tuple(self._costs_s)
        if len(costs_s) < 2:
            return few
        paid = median_low(costs_s) / (COST_SHARE * max(self.step_s, _SHORTEST_STEP_S))
        return max(few, 1 << math.ceil(math.log2(min(max(paid, 1.0), _MAX_STEPS))))


_RECORD_S = 3600.0
"""The age difference to the newest checkpoint that the record beside it may have: the first attempt finds a new one."""

_MARKS = 4
"""The steps of which a replica remembers its own mark, to compare it with that of a replica that is behind."""


def _call_at_once(work: Callable[[], None]) -> None:
    """Run `work`, and return when it is done."""
    work()


class CheckpointManager:
    """The checkpoints of a worker's stage, which its first replica writes, and the messages that the worker has put.

    If the optimiser is divided, or sums are made in 8 bits, every replica writes its own part, and the first replica
    the model too. `repeated_until` is the number of steps of which some message was there when the worker started or
    went back.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        storage: Storage,
        keys: Keys,
        *,
        lease: Lease,
        computation: Computation,
        interval: CheckpointInterval,
        steps: int,
    ) -> None:
        """The run ends after `steps` steps."""
        self._spec = spec
        self._worker = spec.stage, spec.replica
        self._storage = storage
        self._keys = keys
        self._lease = lease
        self._computation = computation
        self._interval = interval
        self._steps = steps
        self._checkpoints = Checkpoints(storage, keys, first_step=spec.first_step, attempt=spec.attempt)
        self._messages = MessageGC(self._worker)
        self._saved_step = self._done_step = spec.first_step
        self._repeats = spec.attempt > 0
        self._marks: dict[int, ReplicaMark] = {}
        self._record_due_s = time.monotonic() + _RECORD_S if spec.attempt == 0 else -math.inf
        self.written: frozenset[str] = frozenset()
        self.repeated_until = 0
        self.drift: Difference | None = None

    @property
    def newest_step(self) -> int:
        """The newest step of which this worker knows that its stage was saved, or due to be saved, after it."""
        return max(self._saved_step, self._done_step)

    def restore(self, messages_of: Callable[[int], StepMessages]) -> int:
        """Restore the newest checkpoint that this worker can restart from; the number of steps it covers.

        Where steps were done before, it also takes charge of their messages: `messages_of` returns what the
        worker puts in a step. Those of steps that are to be repeated are `written` then.
        """
        if self._repeats:
            self._checkpoints.take_over_marks(self._worker)
        self._saved_step, state = self._checkpoints.load_latest(self._worker, self._computation.restore)
        if state is not None:
            _log.info("restored the checkpoint after step %d", self._saved_step)
        elif self.drift is not None:
            raise CorruptMessage(f"{self.drift}; nothing is saved yet, so another attempt begins anew")
        if self._repeats:
            self._adopt_messages(messages_of)
        self._repeats = True
        self._marks, self.drift = {}, None
        return self._saved_step

    def record_messages(self, step: int, messages: StepMessages) -> None:
        """Record what the worker has put in `step`."""
        self._messages.add_step(step, messages)

    def after_step(self, done: int, submit: Callable[[Callable[[], None]], None]) -> None:
        """Save the stage after `done` steps if that is due, and delete what is not needed any more.

        What readers have saved is looked for a step after a checkpoint is due, and again 1, 2, 4 … steps later, until
        all messages from before are deleted. `submit` runs its argument in the background, after everything that was
        submitted before. What all of this costs is recorded, so that the interval follows from it.
        """
        began_s, submit = time.monotonic(), self._measured(submit)
        every, compare_every = self._interval.steps(), self._spec.faults.compare_steps
        saves = done % every == 0 and done < self._steps
        if saves:
            self._interval.begin_checkpoint()
            self.save(done, submit)
            submit(self._keep_record_young)
        if saves or (compare_every is not None and done % compare_every == 0):
            mark = self._mark(done)
            submit(lambda: self._record_done(done, mark))
            submit(self._compare)
        since = (done - 1) % every
        if since == 0 or (_is_power_of_two(since) and self._messages.keeps_before(done - 1 - since)):
            submit(self._delete_unneeded)
        self._interval.record_cost(time.monotonic() - began_s)

    def _measured(self, submit: Callable[[Callable[[], None]], None]) -> Callable[[Callable[[], None]], None]:
        """As `submit`; the processor time of what runs in the background is a cost of checkpoints."""

        def measured(work: Callable[[], None]) -> None:
            began_s = time.thread_time()
            work()
            self._interval.record_cost(time.thread_time() - began_s)

        return lambda work: submit(functools.partial(measured, work))

    def mark_done(self, done: int) -> None:
        """Record in storage that the worker has finished `done` steps, including all its writes."""
        self._record_done(done, self._mark(done))

    def _record_done(self, done: int, mark: ReplicaMark | None) -> None:
        self._checkpoints.mark_done(self._worker, done, mark)
        self._done_step = done

    def _mark(self, done: int) -> ReplicaMark | None:
        """Return the mark of this replica's state now; None if there is no other replica."""
        if self._spec.plan.replicas == 1:
            return None
        mark = ReplicaMark(
            digest=digest_of(self._computation.shared_parameters),
            attempt=self._spec.attempt,
            instructions=instruction_set(),
        )
        self._marks = {**dict(sorted(self._marks.items())[1 - _MARKS :]), done: mark}
        return mark

    def _keep_record_young(self) -> None:
        """See that the record beside the checkpoints is about as young as they are; the first worker does."""
        if self._spec.is_first and time.monotonic() >= self._record_due_s:
            touch_saved_record(self._storage, self._keys)
            self._record_due_s = time.monotonic() + _RECORD_S

    def _compare(self) -> None:
        """Note in `drift` if this replica differs from the first one."""
        if self._spec.replica and self.drift is None:
            self.drift = compare(self._storage, self._keys, self._worker, self._marks)

    def save(
        self, done: int, submit: Callable[[Callable[[], None]], None] = _call_at_once, *, leaving: bool = False
    ) -> None:
        """Save the stage, unless it is saved already or another replica saves it.

        What was written is read back by `submit`, and counts as saved afterwards; a state that steps do not change is
        also written there. A worker that is `leaving` saves in any case what its successor needs.
        """
        parted, first = self._computation.saves_part, self._spec.replica == 0
        if self._saved_step == done > self._spec.first_step and not (parted and leaving and not first):
            return
        if not (first or parted or leaving):
            self._computation.check_finite()  # as the replica that saves does, before either begins another step
            return
        began_s = time.monotonic()
        self._lease.check_now()
        begun, part = self._computation.begin_state(), None
        if parted:
            part = CheckpointPart(self._spec.replica, self._spec.plan.replicas, model=first or leaving)

        def write() -> UnpublishedCheckpoint:
            with begun as state:
                if part is not None and not part.model:
                    state = without_model(state, sharded=self._computation.has_own_optimizer)
                writer = f"{self._spec.worker}.a{self._spec.attempt:08d}"
                written = self._checkpoints.write_files(self._spec.stage, done, state, writer=writer, part=part)
            self._interval.checkpoint_s = time.monotonic() - began_s
            return written

        if self._computation.device.is_host or self._computation.feedback() is not None:
            written = write()  # before the next step changes the state
            submit(lambda: self._checkpoints.publish(written))
        else:
            submit(lambda: self._checkpoints.publish(write()))
        self._saved_step = done

    def _adopt_messages(self, messages_of: Callable[[int], StepMessages]) -> None:
        prefix = self._keys.messages(self._spec.worker)
        existing = frozenset(self._storage.list(prefix))
        self._messages = MessageGC(self._worker)
        self.written = frozenset(key for key in existing if self._step_of(key) >= self._saved_step)
        self.repeated_until = 1 + max(map(self._begun_of, self.written), default=-1)
        for step in sorted({self._step_of(key) for key in existing}):
            if step < self._saved_step:
                messages = messages_of(step)
                readers = {key: by for key, by in messages.readers.items() if key in existing}
                self._messages.add_step(step, StepMessages(readers=readers, upstream=messages.upstream))

    def _step_of(self, key: str) -> int:
        return int(key.removeprefix(self._keys.messages(self._spec.worker)).partition("/")[0])

    def _begun_of(self, key: str) -> int:
        """Return a step that had begun when the message was put, which may be before the one it counts in."""
        delay = Task.parse(key.rpartition("/")[2]).delay
        return self._step_of(key) - (delay - 1 if delay else 0)

    def _delete_unneeded(self) -> None:
        index = self._checkpoints.index()
        keys = self._messages.collect(functools.cache(index.restart_step))
        self._storage.delete_many(keys)
        _log.debug("deleted %d messages", len(keys))
        if self._spec.replica == 0:
            plan, stage = self._spec.plan, self._spec.stage
            self._checkpoints.delete(stage, index.outdated(stage, len(plan.stages), plan.replicas), index)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
