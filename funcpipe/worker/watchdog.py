"""A watchdog restarts the silent workers of detached runs, also those that no worker waits for, and when all have died.

A cloud starts one every minute, as a small function; the host of local functions keeps one beside a detached run. It
restarts by the means of `peer_recovery`, so that watchdogs that overlap, peers and clients do not get in each other's
way. It keeps nothing from one function to the next. A worker whose heartbeat is about as old as it should be is at
work; any other is looked at again until its heartbeat changes, or has not changed for too long. So clocks that differ
cost the watchdog some seconds more, and never a worker its lease.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from funcpipe.core import Heartbeat, Outcome, RunAccount, RunRecord, WatchSpec, from_text
from funcpipe.core.logs import in_function
from funcpipe.core.run_key import RunKey
from funcpipe.errors import FuncPipeError, KeyMissing, RunUnknown, Superseded
from funcpipe.platforms.base import Invoked, OpenPlatform, OpenStorage, Storage
from funcpipe.runstate.functions import MarkedKeys, list_detached, unmark_generation
from funcpipe.runstate.generations import load_payload, newest_record
from funcpipe.runstate.halt import read_certain_halt
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import last_attempt
from funcpipe.runstate.liveness import read_heartbeats, worker_names
from funcpipe.runstate.signing import Keyring, OneKey, SignedStorage, key_of
from funcpipe.worker.peer_recovery import PeerRecovery

_log = logging.getLogger(__name__)

WORKER = "watchdog"
"""The name of a watchdog as the worker of its lines."""

ALL_RUNS = "all"
"""The name of the run in its lines, if it watches all of them."""


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """The time that passes, the time of day, and how to wait."""

    monotonic: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


def main(payload: str, *, open_storage: OpenStorage, open_platform: OpenPlatform, invoked: Invoked) -> None:
    """Watch as `payload`, the JSON of a WatchSpec, says."""
    spec = from_text(WatchSpec, payload, source="the invocation payload")
    with in_function(run=spec.run or ALL_RUNS, worker=WORKER, attempt=0):
        watch(spec, open_storage(spec.storage), open_platform)


def _keyring(spec: WatchSpec, storage: Storage, open_platform: OpenPlatform) -> Keyring:
    if spec.run_key:
        return OneKey(RunKey(spec.run_key))
    return MarkedKeys(storage, lambda wrapped: open_platform(spec.platform).unwrap_key(wrapped))


def watch(spec: WatchSpec, storage: Storage, open_platform: OpenPlatform, *, clocks: Clocks | None = None) -> None:
    """Restart silent workers, as `spec` says, until all are known to be at work or no run is left."""
    clocks, keyring = clocks or Clocks(), _keyring(spec, storage, open_platform)
    signed = SignedStorage(storage, keyring)
    watched: dict[str, _WatchedRun] = {}
    while True:
        marked = [prefix for prefix in list_detached(storage) if spec.run in (None, prefix.partition("/")[0])]
        watched = {
            prefix: watched.get(prefix) or _WatchedRun(signed, keyring, prefix, open_platform, clocks)
            for prefix in marked
        }
        for run in watched.values():
            run.poll()
        again = [run for run in watched.values() if spec.until_ended or run.is_unsure]
        if not again:
            return
        clocks.sleep(min(run.heartbeat_s for run in again))


class _WatchedRun:
    """A detached run that one watchdog watches. `is_unsure` is True if a further check is needed."""

    def __init__(
        self, storage: SignedStorage, keyring: Keyring, prefix: str, open_platform: OpenPlatform, clocks: Clocks
    ) -> None:
        self._storage = storage
        self._keyring = keyring
        self._prefix = prefix
        self._open_platform = open_platform
        self._clocks = clocks
        self._recovery: PeerRecovery | None = None
        self._first_seen: dict[str, Heartbeat | None] = {}
        self.heartbeat_s = 1.0
        self.is_unsure = False

    def poll(self) -> None:
        """Restart the workers that have been silent for too long. What is wrong with one run is not with others."""
        self.is_unsure = False
        try:
            record = self._record()
            if record is None or not self._check(record):
                unmark_generation(self._storage, self._prefix)
        except (KeyMissing, Superseded) as error:
            _log.info("%s is being deleted: %s", self._prefix, error)
        except FuncPipeError as error:
            _log.error("%s could not be watched: %s", self._prefix, error)

    def _record(self) -> RunRecord | None:
        """Return the record of the run; None if the run is not to be watched any more."""
        try:
            record = newest_record(self._storage, self._prefix.partition("/")[0])
        except RunUnknown:
            _log.info("%s is gone", self._prefix)
            return None
        keys = Keys.of(record)
        if keys.prefix != self._prefix:
            _log.info("%s has been resumed", self._prefix)
            return None
        halt = read_certain_halt(self._storage, keys)
        if halt is not None:
            _log.info("%s is to end, and is left alone: %s", self._prefix, halt.reason)
            return None
        return record

    def _check(self, record: RunRecord) -> bool:
        """Restart silent workers of the run; False if it has ended."""
        keys, workers = Keys.of(record), worker_names(record)
        recovery = self._recovery = self._recovery or self._new_recovery(keys, workers[0])
        beats = dict(zip(workers, read_heartbeats(self._storage, record), strict=True))
        late = {worker for worker, beat in beats.items() if beat is None or self._seems_late(beat)}
        ended = {worker: outcome for worker in late if (outcome := self._outcome(keys, worker)) is not None}
        if len(ended) == len(workers) or set(ended.values()) - {Outcome.FINISHED}:
            _log.info("%s has ended", self._prefix)
            return False
        late -= ended.keys()
        found = [beat for beat in beats.values() if beat is not None]
        restarted = recovery.check(
            late,
            step=min(record.first_step if beat is None else beat.step for beat in beats.values()),
            account=RunAccount(
                spent_usd=max([record.spent_usd, *(beat.run_usd for beat in found)]),
                elapsed_s=max([record.elapsed_s, *(beat.run_s for beat in found)]),
                requests_usd=max([0.0, *(beat.run_requests_usd for beat in found)]),
                step_s=max([0.0, *(beat.step_s for beat in found)]),
            ),
        )
        self._first_seen = {**beats, **self._first_seen}
        self.is_unsure = any(beats[worker] == self._first_seen[worker] for worker in late - restarted)
        return True

    def _new_recovery(self, keys: Keys, worker: str) -> PeerRecovery:
        spec = load_payload(self._storage, keys, worker, key_of(self._keyring, keys))
        self.heartbeat_s = spec.faults.heartbeat_s
        clock = self._clocks.monotonic
        return PeerRecovery(spec, self._storage, keys, self._open_platform, is_worker=False, clock=clock)

    def _seems_late(self, beat: Heartbeat) -> bool:
        """Return True if the heartbeat is not about as old as it should be, by two clocks that may differ."""
        return abs(self._clocks.now() - beat.sent_at_s) > self.heartbeat_s

    def _outcome(self, keys: Keys, worker: str) -> Outcome | None:
        """Return how the worker has ended for good, if it has."""
        last = last_attempt(self._storage, keys, worker)
        return None if last is None else last.ended
