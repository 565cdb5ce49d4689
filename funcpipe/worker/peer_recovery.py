"""Workers look after those that they wait for: one that is not heard of any more is started again by one of them.

So a run that no client watches outlives the death of a function. A client is faster, which the patience here allows
for. Whoever begins such a restart says so under a key that only one can put; should it die before it has started the
function, those who wait go on counting from there. Leases shut out whoever was thought dead.
"""

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from funcpipe.core import Halt, Heartbeat, Restart, WorkerSpec
from funcpipe.errors import KeyExists, KeyMissing, PlatformError, PlatformRefused
from funcpipe.platforms.base import Platform, Storage
from funcpipe.runstate.documents import get_document, put_document
from funcpipe.runstate.functions import MAX_RESTARTS, start_function
from funcpipe.runstate.halt import halt_run
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import newest_attempt


@dataclass
class _Peer:
    """What was last seen of a worker: its heartbeat, the restarts of it by its peers; and when that was new."""

    attempt: int = -1
    beat: int = 0
    restarts: int = 0
    last: Restart | None = None
    seen_s: float = 0.0

    @property
    def begun(self) -> bool:
        """Whether the newest attempt that is known to have been started was heard of."""
        return self.attempt >= (0 if self.last is None else self.last.attempt)


class PeerRecovery:
    """The workers that one worker waits for."""

    def __init__(
        self,
        spec: WorkerSpec,
        storage: Storage,
        keys: Keys,
        open_platform: Callable[[str], Platform],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._storage = storage
        self._keys = keys
        self._open_platform = open_platform
        self._clock = clock
        self._peers: dict[str, _Peer] = {}

    def look(self, awaited: Collection[str], *, step: int, spent_usd: float, elapsed_s: float) -> None:
        """Start those of the `awaited` workers again that nobody has heard of for long.

        This one waits in `step`, by when the run has cost `spent_usd` and taken `elapsed_s`.
        """
        for worker in self._peers.keys() - set(awaited):
            del self._peers[worker]
        for worker in sorted(awaited):
            if self._is_silent(worker):
                self._restart(worker, step, spent_usd, elapsed_s)

    def _is_silent(self, worker: str) -> bool:
        now_s = self._clock()
        if worker not in self._peers:
            self._peers[worker] = _Peer(seen_s=now_s)
        peer = self._peers[worker]
        if self._has_news(worker, peer):
            peer.seen_s = now_s
        faults = self._spec.faults
        begun_s = faults.lease_s + 3 * faults.heartbeat_s + 2 * faults.cold_start_s
        return now_s - peer.seen_s > (begun_s if peer.begun else faults.start_s + 2 * faults.cold_start_s)

    def _has_news(self, worker: str, peer: _Peer) -> bool:
        before = (peer.attempt, peer.beat, peer.restarts)
        with contextlib.suppress(KeyMissing):
            heartbeat = get_document(self._storage, Heartbeat, self._keys.heartbeat(worker))
            peer.attempt, peer.beat = heartbeat.attempt, heartbeat.beat
        with contextlib.suppress(KeyMissing):
            while True:
                peer.last = get_document(self._storage, Restart, self._keys.restart(worker, peer.restarts))
                peer.restarts += 1
        return before != (peer.attempt, peer.beat, peer.restarts)

    def _restart(self, worker: str, step: int, spent_usd: float, elapsed_s: float) -> None:
        peer = self._peers[worker]
        tries = peer.last.tries + 1 if peer.last is not None and peer.last.step == step else 1
        if tries > MAX_RESTARTS:
            reason = f"worker {worker} was started again {MAX_RESTARTS} times without a step in between"
            halt_run(self._storage, self._keys, Halt(reason=reason))
            return
        newest = newest_attempt(self._storage, self._keys, worker)
        note = Restart(attempt=0 if newest is None else newest + 1, step=step, tries=tries)
        try:
            put_document(self._storage, self._keys.restart(worker, peer.restarts), note, if_absent=True)
        except KeyExists:
            return  # another one that waits for it was first
        told = get_document(self._storage, WorkerSpec, self._keys.payload(worker))
        account = replace(told.account, spent_usd=spent_usd, elapsed_s=elapsed_s)
        with contextlib.suppress(PlatformError, PlatformRefused):  # as if the function had died at once
            start_function(
                self._open_platform(told.platform),
                self._storage,
                self._keys,
                replace(told, attempt=note.attempt, account=account),
            )
