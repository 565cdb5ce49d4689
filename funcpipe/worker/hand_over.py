"""Hand-over of a worker to another function: it starts a successor in time, saves its stage, and hands over.

predecessor   … step | starts successor | step | step | saves | hand-over document | ends
successor              cold start, loads code and tensors, waits … | takes the lease | restores | step …

A platform that cannot start a successor is asked again and again between steps. In the end the worker leaves without
one, its stage saved, and a client, a peer or a watchdog restarts it.
"""

import logging
import threading
import time
from dataclasses import dataclass, replace

from funcpipe.core import HandOver, WorkerReport, WorkerSpec
from funcpipe.core.backoff import Backoff
from funcpipe.core.settings import leaves_at_s, overlap_s
from funcpipe.errors import CorruptMessage, KeyMissing, PlatformError, PlatformRefused, Superseded
from funcpipe.platforms.base import OpenPlatform, Storage
from funcpipe.runstate.documents import POLL_S, exists, find_readable_document, get_document, put_document
from funcpipe.runstate.functions import start_for_worker
from funcpipe.runstate.keys import Keys
from funcpipe.worker.progress import WorkerProgress

_log = logging.getLogger(__name__)

_PAUSES = Backoff(first_s=2.0, most_s=20.0)
"""The pauses before a successor that could not be started is tried again."""

_CHECK_EVERY_S = 2.0  # how often a waiting successor checks that it may still become the worker

_MOST_OF_LIFE = 0.2
"""A start that took more of a function's life than this was an exception."""


@dataclass(frozen=True, slots=True)
class HandOverCosts:
    """Seconds for which the run stands still, and for which functions run beside their successors, of all workers."""

    pause_s: float
    beside_s: float


class Successor:
    """The times at which a function starts its successor, and at which it must leave.

    `step_s` is the time of a step of this function, 0 before its first, and `saving_s` that of a checkpoint. It never
    leaves before the first step, however late it is: the next function would do the same, and the run never go on.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        storage: Storage,
        keys: Keys,
        open_platform: OpenPlatform,
        progress: WorkerProgress,
        *,
        lifetime_s: float | None,
    ) -> None:
        """The function is ended `lifetime_s` after its invocation; None is never."""
        self._lifetime_s = lifetime_s
        self._spec = spec
        self._storage = storage
        self._keys = keys
        self._open_platform = open_platform
        self._progress = progress
        self._started = False
        self._tries = 0
        self._try_at_s = 0.0

    @property
    def follows(self) -> bool:
        """True if this function is itself a successor, which waits for its predecessor."""
        return self._spec.attempt > 0 and self._spec.follows_within_s is not None

    def start_in_time(self, *, last: int, step_s: float, saving_s: float, left_s: float = 0.0) -> None:
        """Start the successor, once, when it is time: it should be ready when this function leaves.

        None is needed where the `last` step of the run ends before, after `left_s` that a validation still takes.
        """
        lifetime_s = self._lifetime_s
        if lifetime_s is None or self._started or not step_s or self._progress.age_s < self._try_at_s:
            return
        ready_s = self._overlap_s(step_s)
        leaves_s = leaves_at_s(lifetime_s, step_s, saving_s)
        if self._progress.age_s + ready_s < leaves_s or self._ends_s(last, step_s, saving_s) + left_s < leaves_s:
            return
        self._tries += 1
        spec = self._next_spec(lifetime_s)
        _log.info("hand-over begins, at an age of %.1f s of %g s", self._progress.age_s, lifetime_s)
        try:
            start_for_worker(self._open_platform(self._spec.platform), self._storage, self._keys, spec)
            self._started = True
            self._forget_before()
            self._progress.budget.begin_overlap(self._progress.billed_s)
        except (PlatformError, PlatformRefused) as error:
            _log.warning("no successor could be started, try %d: %s", self._tries, error)
            self._try_at_s = self._progress.age_s + _PAUSES.pause_s(self._tries)

    def must_leave(self, *, step_s: float, saving_s: float) -> bool:
        """Return True if another step might end after the function's lifetime. It has tried to start a successor."""
        lifetime_s = self._lifetime_s
        if lifetime_s is None or not self._tries:
            return False
        return self._progress.age_s >= leaves_at_s(lifetime_s, step_s, saving_s)

    def hand_over(self, step: int) -> None:
        """Report to the successor that `step` steps are done and saved."""
        if not self._started:
            self._forget_before()
        put_document(self._storage, self._keys.hand_over(self._spec.worker, self._spec.attempt), HandOver(step=step))
        if self._started:
            _log.info("handed over to attempt %d after step %d", self._spec.attempt + 1, step)
        else:
            _log.warning("leaves after step %d without a successor: others have to restart this worker", step)

    def _forget_before(self) -> None:
        """Delete the heartbeat of the function before, where there is a report to bill."""
        spec, before = self._spec, self._spec.attempt - 1
        if before < 0:
            return
        outdated = [self._keys.hand_over(spec.worker, before - 1)] if before else []
        report = self._keys.worker_report(spec.worker, before)
        if find_readable_document(self._storage, WorkerReport, report) is not None:
            outdated.append(self._keys.heartbeat(spec.worker, before))
        self._storage.delete_many(outdated)

    def costs_within(self, seconds: float, *, step_s: float, saving_s: float) -> HandOverCosts:
        """Return the cost to the run of the hand-overs, if any, that begin in so many seconds.

        All workers hand over at about the same time, each in another step, and each time all wait until its stage is
        saved and loaded again.
        """
        lifetime_s = self._lifetime_s
        if lifetime_s is None or self._progress.age_s + seconds < leaves_at_s(lifetime_s, step_s, saving_s):
            return HandOverCosts(pause_s=0.0, beside_s=0.0)
        beside_s = 0.0 if self._started else self._overlap_s(step_s)
        return HandOverCosts(pause_s=2 * saving_s * self._progress.workers, beside_s=beside_s)

    def _overlap_s(self, step_s: float) -> float:
        """Return the seconds before it leaves at which this function starts its successor: one starts as it did."""
        own_s = min(self._progress.start_s, _MOST_OF_LIFE * (self._lifetime_s or 0.0))
        return overlap_s(max(self._spec.faults.cold_start_s, own_s), step_s)

    def _ends_s(self, last: int, step_s: float, saving_s: float) -> float:
        """Return the age at which this function will have finished the `last` step and saved it."""
        return self._progress.age_s + (last - self._progress.done) * step_s + saving_s

    def _next_spec(self, lifetime_s: float) -> WorkerSpec:
        left_s = max(lifetime_s - self._progress.age_s, POLL_S)
        account = self._progress.successor_account
        return replace(self._spec, attempt=self._spec.attempt + 1, follows_within_s=left_s, account=account)


def await_predecessor(spec: WorkerSpec, storage: Storage, keys: Keys) -> bool:
    """Return when the attempt before has handed over, or its function must have reached the end of its lifetime.

    Returns whether this attempt may take over in any case: it has handed over, or it has none before it to wait for.
    Raises Superseded once it can never be the worker: as its client has restarted the worker under the same number, or
    the worker has ended, the attempt before never hands over.
    """
    if spec.follows_within_s is None or spec.attempt == 0:
        return True
    key = keys.hand_over(spec.worker, spec.attempt - 1)
    began_s = checked_s = time.monotonic()
    while (left_s := began_s + spec.follows_within_s - time.monotonic()) > 0:
        try:
            step = get_document(storage, HandOver, key).step
        except KeyMissing:
            if time.monotonic() - checked_s >= _CHECK_EVERY_S:
                checked_s = time.monotonic()
                if exists(storage, keys.lease(spec.worker, spec.attempt)):
                    raise Superseded(
                        f"{spec.worker} has ended, or another function is attempt {spec.attempt}"
                    ) from None
            storage.wait(key, min(left_s, _CHECK_EVERY_S if storage.watches else POLL_S), threading.Event())
            continue
        except CorruptMessage as error:  # it is there, and says nothing that is needed
            _log.warning("takes over, %.1f s after it was ready: %s", time.monotonic() - began_s, error)
            return True
        _log.info("takes over after step %d, %.1f s after it was ready", step, time.monotonic() - began_s)
        return True
    _log.warning("the attempt before has not handed over within %.1f s; takes over without", spec.follows_within_s)
    return False
