"""When a worker saves its stage, what it restores after a restart, and what it deletes from storage."""

import functools
import logging
import time
from collections.abc import Callable

from funcpipe.core import WorkerSpec
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoint_index import CheckpointPart
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease
from funcpipe.training.computation import Computation
from funcpipe.training.state_shards import without_model
from funcpipe.worker.checkpoint_interval import CheckpointInterval
from funcpipe.worker.message_gc import MessageGC, StepMessages

_log = logging.getLogger(__name__)


class CheckpointManager:
    """The checkpoints of a worker's stage, which its first replica writes, and the messages that the worker has put.

    If the optimiser is divided, every replica writes its own shard, and the first replica the model too.
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
        self._checkpoints = Checkpoints(storage, keys, first_step=spec.first_step)
        self._messages = MessageGC()
        self._saved_step = self._done_step = spec.first_step

    @property
    def newest_step(self) -> int:
        """The newest step of which this worker knows that its stage was saved, or due to be saved, after it."""
        return max(self._saved_step, self._done_step)

    def restore(self, messages_of: Callable[[int], StepMessages]) -> int:
        """Restore the newest checkpoint that this worker can restart from; the number of steps it covers.

        A later attempt also takes charge of the messages that earlier attempts left from steps before: `messages_of`
        tells what the worker puts in a step.
        """
        self._saved_step, state = self._checkpoints.load_latest(self._worker)
        if state is not None:
            self._computation.restore(state)
            _log.info("restored the checkpoint after step %d", self._saved_step)
        if self._spec.attempt:
            self._adopt_messages(messages_of)
        return self._saved_step

    def record_messages(self, step: int, messages: StepMessages) -> None:
        """Record what the worker has put in `step`."""
        self._messages.add_step(step, messages)

    def after_step(self, done: int, submit: Callable[[Callable[[], None]], None]) -> None:
        """After `done` steps, save the stage if that is due, and delete what nobody needs any more.

        `submit` runs its argument in the background, after everything that was submitted before.
        """
        every = self._interval.steps()
        if done % every == 0 and done < self._steps:
            self.save(done)
            submit(lambda: self.mark_done(done))
        if (done - 1) % every == 0:
            submit(self._delete_unneeded)

    def mark_done(self, done: int) -> None:
        """Record in storage that the worker has finished `done` steps, including all its writes."""
        self._checkpoints.mark_done(self._worker, done)
        self._done_step = done

    def save(self, done: int, *, leaving: bool = False) -> None:
        """Save the stage, unless it is saved already or another replica saves it.

        A worker that is `leaving` saves in any case what its successor needs.
        """
        sharded, first = self._computation.is_sharded, self._spec.replica == 0
        if self._saved_step == done > self._spec.first_step and not (sharded and leaving and not first):
            return
        if not (first or sharded or leaving):
            return
        began_s = time.monotonic()
        self._lease.check_now()
        state, part = self._computation.state(), None
        if sharded:
            part = CheckpointPart(self._spec.replica, self._spec.plan.replicas, model=first or leaving)
            state = state if part.model else without_model(state)
        writer = f"{self._spec.worker}.a{self._spec.attempt:08d}"
        self._checkpoints.save(self._spec.stage, done, state, writer=writer, part=part)
        self._saved_step = done
        self._interval.record_checkpoint(time.monotonic() - began_s)

    def _adopt_messages(self, messages_of: Callable[[int], StepMessages]) -> None:
        prefix = self._keys.messages(self._spec.worker)
        existing = frozenset(self._storage.list(prefix))
        for step in sorted({int(key.removeprefix(prefix).partition("/")[0]) for key in existing}):
            if step < self._saved_step:
                messages = messages_of(step)
                readers = {key: by for key, by in messages.readers.items() if key in existing}
                self._messages.add_step(step, StepMessages(readers=readers, upstream=messages.upstream))

    def _delete_unneeded(self) -> None:
        index = self._checkpoints.index()
        keys = self._messages.collect(functools.cache(index.restart_step))
        for key in keys:
            self._storage.delete(key)
        _log.debug("deleted %d messages", len(keys))
        if self._spec.replica == 0:
            plan, stage = self._spec.plan, self._spec.stage
            self._checkpoints.delete(stage, index.outdated(stage, len(plan.stages), plan.replicas))
