"""What a worker keeps in the storage for a later attempt, and what it deletes once nobody needs it."""

import functools
import time
from collections.abc import Callable, Mapping

from funcpipe.core import WorkerSpec
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoint_index import CheckpointPart
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease
from funcpipe.training.computation import Computation
from funcpipe.training.state_shards import without_model
from funcpipe.worker.checkpoint_interval import CheckpointInterval
from funcpipe.worker.message_gc import MessageGC, Worker

Written = tuple[Mapping[str, frozenset[Worker]], frozenset[Worker]]
"""The keys of a step's messages with their readers, and whom the writer heard from in that step."""


class CheckpointManager:
    """The checkpoints of a worker's stage, which its first replica writes, and the worker's own messages.

    Where the optimiser is divided, every replica writes its part, and the first one the model.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        storage: Storage,
        keys: Keys,
        *,
        lease: Lease,
        computation: Computation,
        pace: CheckpointInterval,
        steps: int,
    ) -> None:
        """The run has so many `steps`."""
        self._spec = spec
        self._storage = storage
        self._keys = keys
        self._lease = lease
        self._computation = computation
        self._pace = pace
        self._steps = steps
        self._checkpoints = Checkpoints(storage, keys, first_step=spec.first_step)
        self._retention = MessageGC()
        self.saved = self.marked = spec.first_step

    def restore(self, written: Callable[[int], Written]) -> int:
        """Go back to the newest checkpoint of the stage that this worker has come to; the step that comes after it.

        An attempt that is not the first takes over the messages that those before have left, of the steps before:
        `written` tells of a step what it wrote.
        """
        self.saved, state = self._checkpoints.restart((self._spec.stage, self._spec.replica))
        if state is not None:
            self._computation.restore(state)
        if self._spec.attempt:
            prefix = self._keys.messages(self._spec.worker)
            there = frozenset(self._storage.list(prefix))
            for step in sorted({int(key.removeprefix(prefix).partition("/")[0]) for key in there}):
                if step < self.saved:
                    keys, heard = written(step)
                    self._retention.after_step(step, {key: keys[key] for key in keys if key in there}, heard)
        return self.saved

    def wrote(self, step: int, written: Written) -> None:
        """Note what was written in `step`."""
        self._retention.after_step(step, *written)

    def keep(self, done: int, in_background: Callable[[Callable[[], None]], None]) -> None:
        """After `done` steps, save the stage where that is due, and delete what nobody needs any more.

        What is done in the background comes after all that was put there before.
        """
        every = self._pace.every()
        if done % every == 0 and done < self._steps:
            self.save(done)
            in_background(lambda: self.mark(done))
        if (done - 1) % every == 0:
            in_background(self._sweep)

    def mark(self, done: int) -> None:
        """Note that the worker has done so many steps and written all that it writes in them."""
        self._checkpoints.mark_done((self._spec.stage, self._spec.replica), done)
        self.marked = done

    def save(self, done: int, *, leaving: bool = False) -> None:
        """Save the stage, unless it is saved already or another replica does it; in any case what a successor needs of
        a worker that is `leaving`.
        """
        sharded, first = self._computation.is_sharded, self._spec.replica == 0
        if self.saved == done > self._spec.first_step and not (sharded and leaving and not first):
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
        self.saved = done
        self._pace.checkpoint_took(time.monotonic() - began_s)

    def _sweep(self) -> None:
        plan, stage = self._spec.plan, self._spec.stage
        listing = self._checkpoints.listing()
        for key in self._retention.covered(functools.cache(listing.restart)):
            self._storage.delete(key)
        if self._spec.replica == 0:
            self._checkpoints.delete(stage, listing.outdated(stage, len(plan.stages), plan.replicas))
