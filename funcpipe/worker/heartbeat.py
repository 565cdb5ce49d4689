"""The heartbeat of a worker, and what ends the worker before its time: orders to halt, and the limits of the run.

The heartbeat is a thread that reports the worker's state, and reads the orders that it must obey. It also notices what
must end the worker while its lanes compute or wait: a lost lease, an exceeded limit, storage that stays out of reach.

Limits of cost and time are found by the workers themselves. The order to end names a step that all workers read in
time. Where steps become so slow that it would come too late, or all wait for one worker, as in a hand-over, the run
ends at once: a little before the limit, so that each worker can still end its step, and save its stage.

All workers must end after the same step. An order comes in time if the worker has not begun the step that would be
the first one too many; a worker that reads it later decides that it does not hold, before any can have obeyed it. An
order to end at once is obeyed between two steps where that can be. No worker ends a step that another one has not
begun, as each needs what all others put in it. So workers that end the step that they are in, if they can, and begin
none, all stop after the same step: those that are a step ahead of others cannot end theirs.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from funcpipe.core import Halt, Heartbeat
from funcpipe.errors import CorruptMessage, RunHalted, StorageError
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.halt import decide, halt_run, read_order
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease
from funcpipe.worker.checkpoint_manager import CheckpointInterval, CheckpointManager
from funcpipe.worker.hand_over import Successor
from funcpipe.worker.progress import WorkerProgress
from funcpipe.worker.validation import Validator

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


@dataclass(frozen=True, kw_only=True, eq=False)
class LimitCheck:
    """One worker's check of the run's limits, by the parts that it works with."""

    progress: WorkerProgress
    interval: CheckpointInterval
    checkpoints: CheckpointManager
    orders: HaltOrders
    successor: Successor
    validator: Validator | None
    heartbeat_s: float

    def after_step(self) -> None:
        """Order the run to end before it would exceed a limit; at once if steps have become too slow for that."""
        budget, progress = self.progress.budget, self.progress
        if not budget.is_limited or self.behind_steps:  # or would order what others have passed
            return
        if progress.done < progress.steps and (reason := self.exceeded()) is not None:
            self.orders.give(Halt(reason=reason))
            return
        step_s, end_s = self.interval.step_s, self._end_s
        notice_s = budget.notice_steps(step_s) * step_s
        costs = self.successor.costs_within(notice_s + end_s, step_s=step_s, saving_s=self.interval.checkpoint_s)
        halt = budget.halt_before_exceeding(
            step=progress.done,
            steps=progress.steps,
            age_s=progress.billed_s,
            step_s=step_s,
            end_s=end_s + costs.pause_s,
            beside_s=costs.beside_s,
        )
        if halt is not None:
            self.orders.give(halt)

    def exceeded(self, *, ahead_s: float = 0.0) -> str | None:
        """Return the limit that is exceeded, `ahead_s` from now, if the run does not end at once."""
        return self.progress.budget.exceeded(self.progress.billed_s, ahead_s=self._end_s + ahead_s)

    def grace_s(self) -> float:
        """For how long a worker that is to end at once may go on: for the step that it is in, if that is for a limit.

        That is twice as long as any step lasted, and as long as those that it has yet to do again.
        """
        return self._ending_s if self.is_near() else 0.0

    def is_near(self) -> bool:
        """Return True if a limit is reached within two heartbeats: others have reached it before."""
        return self.exceeded(ahead_s=2 * self.heartbeat_s) is not None

    @property
    def behind_steps(self) -> int:
        """The number of steps that this worker has yet to do again, and others have done."""
        return max(self.checkpoints.repeated_until - self.progress.done, 0)

    @property
    def _ending_s(self) -> float:
        return (2 + self.behind_steps) * self.interval.longest_step_s + self.heartbeat_s / 4

    @property
    def _end_s(self) -> float:
        """The time to end at once: to end a step, to validate if that is due, and to save the stage."""
        validation_s = 0.0 if self.validator is None else self.validator.took_s
        return self._ending_s + validation_s + self.interval.checkpoint_s
