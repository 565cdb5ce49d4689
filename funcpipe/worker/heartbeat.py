"""The thread in every worker that says how it fares, and hears what it must not miss while it is busy or waits."""

import threading
from collections.abc import Callable

from funcpipe.core import Halt, Heartbeat
from funcpipe.errors import KeyExists, KeyMissing, RunHalted, StorageError
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import get_document, put_document
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease

_TROUBLES = 5  # beats in a row without the storage, before the worker gives up


class HeartbeatThread:
    """Beats every `heartbeat_s`. What it hears that must end the work is kept in `verdict`, and sets `cancel`."""

    def __init__(
        self,
        storage: Storage,
        keys: Keys,
        lease: Lease,
        *,
        describe: Callable[[int], Heartbeat],
        exceeded: Callable[[], str | None],
        look_around: Callable[[], None],
        heartbeat_s: float,
        cancel: threading.Event,
    ) -> None:
        """`describe` makes the heartbeat of that number; `exceeded` tells of a limit that is exceeded already.

        `look_around` is done with each beat.
        """
        self._storage = storage
        self._keys = keys
        self._lease = lease
        self._describe = describe
        self._exceeded = exceeded
        self._look_around = look_around
        self._heartbeat_s = heartbeat_s
        self._cancel = cancel
        self._stop = threading.Event()
        self._beats = self._late_beats = 0
        self._thread = threading.Thread(target=self._live, name="funcpipe-heart", daemon=True)
        self.halt: Halt | None = None
        self.verdict: Exception | None = None

    def __enter__(self) -> "HeartbeatThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def beat_last(self) -> None:
        """Say how the worker fared in the end, unless it is somebody else by now."""
        self._lease.check_now()
        heartbeat = self._describe(self._beats + 1)
        put_document(self._storage, self._keys.heartbeat(heartbeat.worker), heartbeat)

    def obey(self, step: int) -> bool:
        """Whether the worker is to end now, having done `step` steps."""
        return self.halt is not None and self.halt.step is not None and step >= self.halt.step

    def order(self, halt: Halt) -> None:
        """Order the whole run to end, unless somebody has done so."""
        if self.halt is None:
            self.halt = halt_run(self._storage, self._keys, halt)

    def _live(self) -> None:
        troubles = 0
        while not self._stop.wait(self._heartbeat_s if self._beats else 0):
            self._beats += 1
            try:
                self._beat(self._beats)
                troubles = 0
            except StorageError as error:
                troubles += 1
                if troubles == _TROUBLES:
                    self._end(error)
            except Exception as error:  # noqa: BLE001 - whatever ends the heart ends the worker, which raises it
                self._end(error)
            if self.verdict is not None:
                return

    def _beat(self, beat: int) -> None:
        self._lease.check_now()
        if self.halt is None:
            self.halt = standing_order(self._storage, self._keys)
        heartbeat = self._describe(beat)
        put_document(self._storage, self._keys.heartbeat(heartbeat.worker), heartbeat)
        reason = self._exceeded()
        if self.halt is not None and self._is_late(self.halt, heartbeat.step):
            reason = self.halt.reason
        if reason is not None:
            self._end(RunHalted(reason))
        else:
            self._look_around()

    def _is_late(self, halt: Halt, step: int) -> bool:
        """Whether the others have ended, or are to end at once: heard of in the midst of a step that they do not do."""
        if halt.step is None:
            return True
        self._late_beats = self._late_beats + 1 if step >= halt.step else 0
        return self._late_beats > 1

    def _end(self, error: Exception) -> None:
        self.verdict = error
        self._cancel.set()


def standing_order(storage: Storage, keys: Keys) -> Halt | None:
    """The order to end, if one was given."""
    try:
        return get_document(storage, Halt, keys.halt)
    except KeyMissing:
        return None


def halt_run(storage: Storage, keys: Keys, halt: Halt) -> Halt:
    """Give the order to end; the one that holds, which another may have given first."""
    try:
        put_document(storage, keys.halt, halt, if_absent=True)
    except KeyExists:
        return get_document(storage, Halt, keys.halt)
    return halt
