"""What a worker keeps in the storage for a later attempt, and what it deletes once nobody needs it."""

import time
from collections.abc import Callable, Mapping

from funcpipe.comm.keys import Keys
from funcpipe.computation import Computation
from funcpipe.core import WorkerSpec
from funcpipe.life.checkpoints import Checkpoints, common_step, outdated
from funcpipe.life.interval import Pace
from funcpipe.life.lease import Lease
from funcpipe.life.retention import Retention, Worker
from funcpipe.platforms.base import Storage

Written = tuple[Mapping[str, frozenset[Worker]], frozenset[Worker]]
"""The keys of a step's messages with their readers, and whom the writer heard from in that step."""


class Keeper:
    """The checkpoints of a worker's stage, which its first replica writes, and the worker's own messages."""

    def __init__(
        self,
        spec: WorkerSpec,
        storage: Storage,
        keys: Keys,
        *,
        lease: Lease,
        computation: Computation,
        pace: Pace,
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
        self._checkpoints = Checkpoints(storage, keys)
        self._retention = Retention()
        self.saved = spec.first_step

    def restore(self, written: Callable[[int], Written]) -> int:
        """Go back to the stage's newest checkpoint; the step that comes after it.

        An attempt that is not the first takes over the messages that those before have left, of the steps before:
        `written` tells of a step what it wrote.
        """
        found = self._checkpoints.newest(self._spec.stage)
        if found is not None:
            self.saved, state = found
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
        """After `done` steps, save the stage where that is due, and delete what nobody needs any more."""
        every = self._pace.every()
        if done % every == 0 and done < self._steps:
            self.save(done)
        if (done - 1) % every == 0:
            in_background(self._sweep)

    def save(self, done: int, *, as_any_replica: bool = False) -> None:
        """Save the stage, unless it is saved already or another replica does it."""
        if (self.saved == done and done > self._spec.first_step) or (self._spec.replica and not as_any_replica):
            return
        began_s = time.monotonic()
        self._lease.check_now()
        writer = f"{self._spec.worker}.a{self._spec.attempt:08d}"
        self._checkpoints.save(self._spec.stage, done, self._computation.state(), writer=writer)
        self.saved = done
        self._pace.checkpoint_took(time.monotonic() - began_s)

    def _sweep(self) -> None:
        stages = len(self._spec.plan.stages)
        listing = self._checkpoints.listing()
        newest = {stage: max((step for step, _ in listing.get(stage, ())), default=0) for stage in range(stages)}
        for key in self._retention.covered(newest):
            self._storage.delete(key)
        if self._spec.replica == 0:
            common = common_step(listing, stages, self._spec.first_step)
            self._checkpoints.delete(self._spec.stage, outdated(listing, self._spec.stage, common=common))
