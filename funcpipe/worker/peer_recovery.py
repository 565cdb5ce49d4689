"""Workers watch the workers that they wait for, and restart one that has gone silent; a watchdog does it for all.

So a run survives the death of functions even if no client watches it. A client would notice earlier; the time-outs
here leave it the first try. To restart a worker, a peer first puts a `Restart` document under a key that only one can
put. If that peer dies before it has started the function, the others time out again and put the next document. Leases
fence off a worker that was only thought to be dead.
"""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from funcpipe.core import Halt, Outcome, Restart, RunAccount, WorkerSpec
from funcpipe.core.run_key import RunKey
from funcpipe.errors import KeyExists, PlatformError, PlatformRefused
from funcpipe.platforms.base import OpenPlatform, Storage
from funcpipe.platforms.function_group import MAX_RESTARTS
from funcpipe.runstate.documents import exists, find_readable_document, put_document
from funcpipe.runstate.functions import OUT_OF_REACH_S, start_for_worker
from funcpipe.runstate.generations import load_payload
from funcpipe.runstate.halt import BudgetGuard, halt_run
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import last_attempt
from funcpipe.runstate.liveness import newest_heartbeat

_log = logging.getLogger(__name__)


@dataclass
class _Peer:
    """The last heartbeat seen of a worker, its restarts by its peers, and when either last changed."""

    attempt: int = -1
    beat: int = 0
    restarts: int = 0
    last_restart: Restart | None = None
    changed_s: float = 0.0

    @property
    def has_started(self) -> bool:
        """True if the newest attempt that is known to have been started has sent a heartbeat."""
        return self.attempt >= (0 if self.last_restart is None else self.last_restart.attempt)


class PeerRecovery:
    """Restarts silent workers, which all have `spec.faults`, on behalf of a worker that waits, or of a watchdog."""

    def __init__(
        self,
        spec: WorkerSpec,
        storage: Storage,
        keys: Keys,
        open_platform: OpenPlatform,
        *,
        is_worker: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`spec` is that of the worker that waits; a watchdog, which is none, takes that of any worker of the run."""
        self._spec = spec
        self._is_worker = is_worker
        self._storage = storage
        self._keys = keys
        self._open_platform = open_platform
        self._clock = clock
        self._peers: dict[str, _Peer] = {}

    def check(self, awaited: Collection[str], *, step: int, account: RunAccount) -> frozenset[str]:
        """Restart those of the `awaited` workers that have been silent for too long; returns which these are.

        The run waits in `step`, and has cost and taken what `account` says.
        """
        for worker in self._peers.keys() - set(awaited):
            del self._peers[worker]
        silent = frozenset(worker for worker in awaited if self._is_silent(worker))
        for worker in sorted(silent):
            self._restart(worker, step, account)
        return silent

    def _is_silent(self, worker: str) -> bool:
        now_s = self._clock()
        if worker not in self._peers:
            self._peers[worker] = _Peer(changed_s=now_s)
        peer = self._peers[worker]
        if self._has_changed(worker, peer):
            peer.changed_s = now_s
        faults = self._spec.faults
        running_s = faults.lease_s + 3 * faults.heartbeat_s + 2 * faults.cold_start_s
        starting_s = faults.start_s + 2 * faults.cold_start_s
        if self._clock() - now_s > OUT_OF_REACH_S:
            peer.changed_s = self._clock()
        silent_s = now_s - peer.changed_s
        starts = not peer.has_started or (silent_s > running_s and self._has_handed_over(worker, peer))
        return silent_s > (starting_s if starts else running_s)

    def _has_handed_over(self, worker: str, peer: _Peer) -> bool:
        """Return True if its newest attempt has ended in good order, so that a successor is about to start."""
        return exists(self._storage, self._keys.hand_over(worker, peer.attempt))

    def _has_changed(self, worker: str, peer: _Peer) -> bool:
        before = (peer.attempt, peer.beat, peer.restarts)
        heartbeat = newest_heartbeat(self._storage, self._keys, worker)
        if heartbeat is not None:
            peer.attempt, peer.beat = heartbeat.attempt, heartbeat.beat
        while exists(self._storage, key := self._keys.restart(worker, peer.restarts)):
            peer.last_restart = find_readable_document(self._storage, Restart, key) or peer.last_restart
            peer.restarts += 1
        return before != (peer.attempt, peer.beat, peer.restarts)

    def _restart(self, worker: str, step: int, so_far: RunAccount) -> None:
        peer = self._peers[worker]
        silent_s = self._clock() - peer.changed_s
        last = peer.last_restart
        newest = last_attempt(self._storage, self._keys, worker)
        if newest is not None and newest.ended is not None:
            if newest.ended is Outcome.FAILED:
                self._halt(f"worker {worker} failed")
            return
        step = step if last is None else max(step, last.step)  # the worker that restarted it last may have been ahead
        tries = last.tries + 1 if last is not None and last.step == step else 1
        first = load_payload(self._storage, self._keys, worker, RunKey(self._spec.run_key))
        account = replace(
            first.account,
            spent_usd=so_far.spent_usd,
            elapsed_s=so_far.elapsed_s,
            requests_usd=so_far.requests_usd,
            step_s=so_far.step_s,
        )
        reason = BudgetGuard(first.limits, account, first.faults.heartbeat_s).exceeded(age_s=0.0)
        if tries > MAX_RESTARTS:
            reason = f"worker {worker} was started again {MAX_RESTARTS} times without a step in between"
        if reason is not None:
            self._halt(reason)
            return
        restart = Restart(attempt=0 if newest is None else newest.attempt + 1, step=step, tries=tries)
        try:
            put_document(self._storage, self._keys.restart(worker, peer.restarts), restart, if_absent=True)
        except KeyExists:
            _log.debug("another peer restarts worker %s", worker)
            return
        _log.warning(
            "restarts worker %s as attempt %d, try %d: silent for %.1f s", worker, restart.attempt, tries, silent_s
        )
        self._start(replace(first, attempt=restart.attempt, account=account))

    def _halt(self, reason: str) -> None:
        order = Halt(reason=reason)
        if self._is_worker:
            order = replace(order, worker=self._spec.worker, attempt=self._spec.attempt)
        halt_run(self._storage, self._keys, order)

    def _start(self, spec: WorkerSpec) -> None:
        """Start a function; if the platform cannot, the worker stays silent and is restarted once more."""
        try:
            start_for_worker(self._open_platform(spec.platform), self._storage, self._keys, spec)
        except (PlatformError, PlatformRefused) as error:
            _log.warning("worker %s could not be restarted: %s", spec.worker, error)
