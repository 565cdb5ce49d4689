"""The heartbeat of a worker: a thread that reports the worker's state, and reads the orders that it must obey.

It also notices what must end the worker while its lanes compute or wait: a lost lease, an exceeded limit, storage that
stays out of reach.
"""

import logging
import threading
from collections.abc import Callable

from funcpipe.core import Halt, Heartbeat
from funcpipe.errors import RunHalted, StorageError
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease
from funcpipe.worker.halt_orders import HaltOrders

_log = logging.getLogger(__name__)

_MAX_FAILED_BEATS = 5
"""Heartbeats in a row that may fail because of the storage before the worker gives up."""


_PAUSES = 5
"""The pauses in which a worker that is to end at once may still end its step."""


class HeartbeatThread:
    """Beats every `heartbeat_s` seconds within its context.

    An error that must end the worker is kept in `fatal_error`, and sets `cancel`, which stops the lanes.
    """

    def __init__(
        self,
        storage: Storage,
        keys: Keys,
        lease: Lease,
        orders: HaltOrders,
        *,
        describe: Callable[[int], Heartbeat],
        exceeded: Callable[[], str | None],
        after_beat: Callable[[], None],
        grace_s: Callable[[], float],
        heartbeat_s: float,
        cancel: threading.Event,
    ) -> None:
        """`describe` makes the heartbeat of a number; `exceeded` names a limit that is exceeded, if any.

        `after_beat` is called after each heartbeat that lets the worker go on. One that is to end at once may go on for
        `grace_s`, to end between two steps.
        """
        self._storage = storage
        self._keys = keys
        self._lease = lease
        self._orders = orders
        self._describe = describe
        self._exceeded = exceeded
        self._after_beat = after_beat
        self._grace_s = grace_s
        self._heartbeat_s = heartbeat_s
        self._cancel = cancel
        self._stop = threading.Event()
        self._beats = self._failed_beats = 0
        self._thread = threading.Thread(target=self._run, name="funcpipe-heartbeat", daemon=True)
        self.fatal_error: Exception | None = None

    def __enter__(self) -> "HeartbeatThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_beats()

    def beat_last(self) -> None:
        """Send the worker's final state, after all other heartbeats; raises Superseded if another function is the
        worker by now.
        """
        self._end_beats()
        self._lease.check_now()
        self._put(self._describe(self._beats + 1))

    def _end_beats(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._heartbeat_s if self._beats else 0):
            self._beats += 1
            self._try_beat()
            if self.fatal_error is not None:
                return

    def _try_beat(self) -> None:
        try:
            self._beat()
            self._failed_beats = 0
        except StorageError as error:
            self._failed_beats += 1
            _log.warning("heartbeat %d failed, %d of %d: %s", self._beats, self._failed_beats, _MAX_FAILED_BEATS, error)
            if self._failed_beats == _MAX_FAILED_BEATS:
                self._end(error)
        except Exception as error:  # noqa: BLE001 - ends the worker, which raises it
            self._end(error)

    def _beat(self) -> None:
        self._lease.check_now()
        reason = self._orders.poll()
        heartbeat = self._describe(self._beats)
        self._put(heartbeat)
        exceeded = self._exceeded() if reason is None else None
        if exceeded is not None:
            _log.warning("a limit of the run is reached: %s", exceeded)
            self._orders.give(Halt(reason=exceeded))
            reason = exceeded
        if reason is None:
            self._after_beat()
        elif not self._ends_in_time():
            self._end(RunHalted(reason))

    def _ends_in_time(self) -> bool:
        """Return True if the worker ends by itself while it may still go on.

        That is counted in pauses: one in which the process stands still is no time in which it could have ended.
        """
        pauses_s = [self._grace_s() / _PAUSES] * _PAUSES
        return any(self._stop.wait(pause_s) for pause_s in pauses_s if pause_s)

    def _put(self, heartbeat: Heartbeat) -> None:
        put_document(self._storage, self._keys.heartbeat(heartbeat.worker, heartbeat.attempt), heartbeat)

    def _end(self, error: Exception) -> None:
        _log.warning("stops the lanes: %s", error)
        self.fatal_error = error
        self._cancel.set()
