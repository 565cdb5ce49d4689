"""The orders to end the run as one worker reads, obeys and gives them.

All workers must end after the same step. An order comes in time if the worker has not begun the step that would be
the first one too many; a worker that reads it later decides that it does not hold, before any can have obeyed it.

An order to end at once is obeyed between two steps where that can be. No worker ends a step that another one has not
begun, as each needs what all others put in it. So workers that end the step that they are in, if they can, and begin
none, all stop after the same step: those that are a step ahead of others cannot end theirs.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from funcpipe.core import Halt
from funcpipe.errors import CorruptMessage, RunHalted
from funcpipe.platforms.base import Storage
from funcpipe.runstate.halt import decide, halt_run, read_order
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease

_log = logging.getLogger(__name__)


class HaltOrders:
    """Shared by the worker's loop and its heartbeat. `notice_steps` returns how far ahead an order has to be."""

    def __init__(self, storage: Storage, keys: Keys, lease: Lease, *, notice_steps: Callable[[], int]) -> None:
        self._storage = storage
        self._keys = keys
        self._lease = lease
        self._notice_steps = notice_steps
        self._lock = threading.Lock()
        self._polling = threading.Lock()
        self._unread = 0
        self._order: tuple[int, Halt] | None = None
        self._begun = -1
        self._obeyed = False
        self._at_once: str | None = None

    def poll(self) -> str | None:
        """Read new orders; return why the worker must end at once, if it must."""
        with self._polling:
            while not self._obeyed and self._poll_next():
                pass
        return self._at_once

    def _poll_next(self) -> bool:
        """Read the next order; return False if there is none."""
        number = self._unread
        try:
            halt = read_order(self._storage, self._keys, number)
        except CorruptMessage as error:
            _log.warning("does without an order that cannot be read: %s", error)
            self._unread += 1
            return True
        if halt is None:
            return False
        when = "at once" if halt.step is None else f"after step {halt.step}"
        _log.info("the run is to end %s: %s", when, halt.reason)
        with self._lock:
            self._unread = number + 1
            in_time = halt.step is not None and self._begun < halt.step
            if in_time:
                self._order = number, halt
        if not in_time and self._holds(number, halt, late=halt.step is not None):
            self._at_once = halt.reason
        return True

    @property
    def last_step(self) -> int | None:
        """The number of steps after which the run is to end; None if there is no order to."""
        order = self._order
        return None if order is None else order[1].step

    def end_before(self, step: int) -> bool:
        """Return True if the worker was ordered to end before `step`. Raises RunHalted if it must end at once.

        Once the run is to end, it polls for orders before each step: one to end at once may follow.
        """
        if self._order is not None:
            self.poll()
        if self._at_once is not None:
            raise RunHalted(self._at_once)
        with self._lock:
            number, halt = self._order or (0, None)
            if halt is not None and halt.step is not None and step >= halt.step:
                self._order = None
                self._obeyed = self._holds(number, halt, late=step > halt.step)
                if self._obeyed:
                    _log.info("obeys the order to end after step %d: %s", halt.step, halt.reason)
                    return True
            self._begun = max(self._begun, step)
            return False

    def give(self, halt: Halt) -> None:
        """Order the whole run to end in this worker's name, unless an order is known already."""
        with self._lock:
            known = self._order is not None
        if not known or halt.step is None:
            self._lease.check_now()
            halt_run(self._storage, self._keys, self._lease.signed(halt))
            self.poll()

    def _holds(self, number: int, halt: Halt, *, late: bool) -> bool:
        """Return True if an order holds; a client's that is too late is given again, as a client gives it only once."""
        holds = decide(self._storage, self._keys, number, halt, late=late)
        if late and not holds and halt.worker is None:
            step = self._begun + 1 + self._notice_steps()
            halt_run(self._storage, self._keys, replace(halt, step=step))
        return holds
