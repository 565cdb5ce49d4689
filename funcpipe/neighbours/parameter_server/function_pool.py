"""The functions of a parameter server: started, watched, and replaced when they leave or die.

A worker is several functions, one after another. When one nears the end of its lifetime, the next is started beside
it, and gets the orders once it is ready. Where a platform has no room for that, the next one is started when the first
has left. A function that is killed, or silent for too long, is followed by another, a few times without an answer.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from funcpipe.core import ServerFunctionSpec
from funcpipe.core.settings import overlap_s
from funcpipe.errors import PlatformError, PlatformRefused, WorkerFailed
from funcpipe.neighbours.parameter_server.function_connection import FunctionConnection, FunctionMessage, Inbox
from funcpipe.neighbours.parameter_server.worker_group import Chunk, Lost, ServerWorker
from funcpipe.platforms.base import Cause, Platform, State, Storage
from funcpipe.platforms.function_group import RESTART_PAUSES, FunctionGroup, Restarts

_log = logging.getLogger(__name__)

_POLL_S = 0.5
"""Pause between two polls of the states of functions; platforms that ask over a network poll less often."""

_START_S = 60.0
"""A function that is not ready so long after its cold start counts as lost."""


@dataclass
class WorkerSlot:
    """The place of a worker, with the function that serves it now, and its successor.

    `restarts` are those since the worker last answered. A successor is not tried before `successor_at_s`. The worker is
    `handing_over` after a function has left in time, until the next one is ready; if it is `leaving`, no other follows.
    """

    worker: ServerWorker
    connection: FunctionConnection | None = None
    successor: FunctionConnection | None = None
    attempts: int = 0
    restarts: Restarts = field(default_factory=Restarts)
    successor_at_s: float = 0.0
    step_s: float = 0.0
    handing_over: bool = False
    leaving: bool = False

    @property
    def is_ready(self) -> bool:
        """True if its function has loaded the model."""
        return self.connection is not None and self.connection.ready

    @property
    def is_open(self) -> bool:
        """True if it can be given orders."""
        return self.is_ready and not self.is_closing

    @property
    def is_closing(self) -> bool:
        """True if its function is about to leave."""
        return self.connection is not None and self.connection.is_closing


class FunctionPool:
    """The functions like `spec` on `platform`. Their connections put what they receive into `inbox`."""

    def __init__(
        self,
        spec: ServerFunctionSpec,
        platform: Platform,
        storage: Storage,
        inbox: Inbox,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._storage, self._inbox, self._clock = spec, storage, inbox, clock
        self._group = FunctionGroup(platform, clock=clock)
        self._polled_s = float("-inf")
        self.slots: dict[str, WorkerSlot] = {}
        self.connections: list[FunctionConnection] = []

    def join(self, worker: ServerWorker) -> None:
        """Start a worker; waits while the platform is busy. Raises PlatformError or PlatformRefused."""
        slot = self.slots[worker.name] = WorkerSlot(worker)
        slot.connection = self._invoke(slot, sleep=time.sleep)

    def leave(self, name: str) -> None:
        """Let a worker end what it has; no function follows."""
        slot = self.slots[name]
        slot.leaving = True
        self._end_if_idle(slot)

    def poll(self) -> list[Lost]:
        """Check now and then which functions have ended or are silent; return what was lost."""
        now_s = self._clock()
        if now_s - self._polled_s < _POLL_S:
            return []
        self._polled_s = now_s
        found = [self._check(connection, now_s) for connection in self.connections if connection.function.runs]
        return [lost for lost in found if lost is not None]

    def start_due(self) -> None:
        """Start the functions that are due: in place of others that have gone, and successors of those that will."""
        now_s = self._clock()
        for slot in list(self.slots.values()):
            if slot.restarts.take_due(now_s):
                self._restart(slot)
            elif self._needs_successor(slot, now_s):
                self._start_successor(slot, now_s)

    def answered(self, connection: FunctionConnection, message: FunctionMessage) -> Lost | None:
        """Handle a function that is ready, or has answered an order, and maybe leaves; return what it left undone."""
        slot = self._slot_of(connection)
        if message.leaves:
            connection.close()
        if slot is None:
            return None
        if message.number:
            slot.restarts.count = 0
            slot.step_s = max(slot.step_s, message.pull_s + message.compute_s)
        lost = self._left(slot, connection) if message.leaves else None
        if connection is slot.connection and connection.ready:
            slot.handing_over = False
        successor = slot.successor
        if successor is not None and successor.ready and (slot.connection is None or not slot.connection.given):
            if slot.connection is not None:
                slot.connection.end()
            slot.connection, slot.successor, slot.handing_over = successor, None, False
        self._end_if_idle(slot)
        return lost

    def ended(self, connection: FunctionConnection) -> Lost | None:
        """Handle a function that ended without a message. Raises WorkerFailed if it was out of memory."""
        status = connection.function.status
        reason = (status.reason if status is not None else "") or "its function ended without a word"
        if status is not None and status.cause is Cause.OUT_OF_MEMORY:
            raise self.out_of_memory(connection, reason)
        return self.lose(connection, reason)

    def lose(self, connection: FunctionConnection, reason: str) -> Lost | None:
        """Give up a function; return the chunks that it was given, unless it was a successor."""
        connection.close()
        slot, now_s = self._slot_of(connection), self._clock()
        if slot is None:
            return None
        pause_s = slot.restarts.add(reason)
        if connection is slot.successor:
            _log.warning("the successor of worker %s is lost: %s", slot.worker.name, reason)
            slot.successor, slot.successor_at_s = None, now_s + pause_s
            return None
        slot.connection, slot.successor, slot.handing_over = slot.successor, None, False
        if slot.connection is None:
            self._plan_restart(slot, now_s + pause_s)
        return Lost(worker=slot.worker.name, chunks=_chunks(connection), reason=reason)

    def out_of_memory(self, connection: FunctionConnection, reason: str) -> WorkerFailed:
        """The error that ends a run whose functions are too small."""
        return WorkerFailed(
            f"worker {connection.spec.worker}, a function of {connection.spec.memory_mb} MB, holds the whole model "
            f"and has run out of memory: {reason}; take functions of more memory, or a smaller micro-batch"
        )

    def stop(self) -> None:
        """End all functions that are not known to have ended."""
        left = self._group.left
        for connection in self.connections:
            connection.close()
        self._group.stop(left)
        for connection in self.connections:
            connection.join()

    def _invoke(self, slot: WorkerSlot, *, sleep: Callable[[float], object] | None = None) -> FunctionConnection:
        spec = replace(self._spec, worker=slot.worker.name, attempt=slot.attempts)
        function = self._group.start(spec, sleep=sleep)
        slot.attempts += 1
        connection = FunctionConnection(spec, function, self._storage, self._inbox, clock=self._clock)
        self.connections.append(connection)
        return connection

    def _check(self, connection: FunctionConnection, now_s: float) -> Lost | None:
        if self._group.poll(connection.function).state is not State.RUNNING:
            connection.function_ended()
            return None
        reason = self._silence(connection, now_s)
        if reason is None:
            return None
        self._group.stop([connection.function])
        return self.lose(connection, reason)

    def _silence(self, connection: FunctionConnection, now_s: float) -> str | None:
        """Return why a running function counts as lost; None if it does not."""
        start_s, answer_s = self._group.platform.spec.cold_start_s + _START_S, self._spec.message_deadline_s
        if not connection.ready and connection.function.watched_s() > start_s:
            return f"its function was not ready {start_s:.0f} s after it was invoked"
        if connection.given and now_s - min(given.at_s for given in connection.given.values()) > answer_s:
            return f"its function has not answered for {answer_s:g} s (message_deadline_s)"
        return None

    def _needs_successor(self, slot: WorkerSlot, now_s: float) -> bool:
        if slot.connection is None or slot.successor is not None or slot.leaving or now_s < slot.successor_at_s:
            return False
        return now_s + overlap_s(self._group.platform.spec.cold_start_s, slot.step_s) >= slot.connection.leaves_at_s

    def _start_successor(self, slot: WorkerSlot, now_s: float) -> None:
        try:
            slot.successor = self._invoke(slot)
        except (PlatformError, PlatformRefused) as error:
            _log.warning("no successor of worker %s could be started: %s", slot.worker.name, error)
            slot.successor_at_s = now_s + RESTART_PAUSES.pause_s(1)

    def _restart(self, slot: WorkerSlot) -> None:
        try:
            slot.connection = self._invoke(slot)
        except PlatformError as error:
            _log.warning("worker %s could not be started again: %s", slot.worker.name, error)
            slot.handing_over = False
            self._plan_restart(slot, self._clock() + slot.restarts.add(f"cannot be started: {error}"))

    def _plan_restart(self, slot: WorkerSlot, at_s: float) -> None:
        if slot.leaving or slot.restarts.are_exhausted:
            _log.warning("worker %s gets no other function", slot.worker.name)
            del self.slots[slot.worker.name]
        else:
            slot.restarts.due_s = at_s

    def _left(self, slot: WorkerSlot, connection: FunctionConnection) -> Lost | None:
        if connection is slot.successor:
            slot.successor = None
        elif connection is slot.connection:
            slot.connection, slot.successor = slot.successor, None
            slot.handing_over = not slot.leaving and not slot.is_ready
            if slot.connection is None:
                self._plan_restart(slot, self._clock())
        chunks = _chunks(connection)
        reason = "its function left, as its lifetime was over, before it could compute what it was given"
        return Lost(worker=slot.worker.name, chunks=chunks, reason=reason) if chunks else None

    def _end_if_idle(self, slot: WorkerSlot) -> None:
        if (
            slot.leaving
            and slot.worker.name in self.slots
            and not (slot.connection is not None and slot.connection.given)
        ):
            for connection in (slot.connection, slot.successor):
                if connection is not None and not connection.over:
                    connection.end()
            del self.slots[slot.worker.name]

    def _slot_of(self, connection: FunctionConnection) -> WorkerSlot | None:
        slot = self.slots.get(connection.spec.worker)
        return slot if slot is not None and connection in (slot.connection, slot.successor) else None


def _chunks(connection: FunctionConnection) -> tuple[Chunk, ...]:
    return tuple(given.chunk for given in connection.given.values())
