"""The functions of a parameter server: they are started, watched, and followed by others when they leave or die.

A worker is several functions, one after another. When the life of one is near its end, the next is started beside it,
and gets the orders from when it is ready. Where a platform has no room for that, the next one is started when the first
has left. A function that is killed, or silent for too long, is followed by another, a few times without an answer.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from funcpipe.core import ServerFunctionSpec
from funcpipe.core.lifetime import overlap_s
from funcpipe.errors import PlatformError, PlatformRefused, WorkerFailed
from funcpipe.parameter_server.crew import Lost
from funcpipe.parameter_server.function_line import FunctionLine, Told
from funcpipe.parameter_server.function_messages import FunctionMessage
from funcpipe.parameter_server.values import Chunk, ServerWorker
from funcpipe.platforms.base import Cause, Platform, State, Status, Storage
from funcpipe.platforms.starting import invoke_with_retry
from funcpipe.runstate.functions import MAX_RESTARTS, RESTART_PAUSES, stop_functions

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""Pause between two looks at the states of functions; platforms that are asked over a network look less often."""

_START_S = 60.0
"""A function that is not ready so long after its cold start counts as lost."""


@dataclass
class Seat:
    """A worker, with the function that it is now, and that which will be it next.

    `restarts` counts since the worker last answered. Another function is due at `restart_at_s`, and another try to
    start a successor not before `successor_at_s`. The worker is `handing_over` after a function has left in time, until
    the next one is ready; if it is `leaving`, no other follows.
    """

    worker: ServerWorker
    line: FunctionLine | None = None
    successor: FunctionLine | None = None
    attempts: int = 0
    restarts: int = 0
    restart_at_s: float | None = None
    successor_at_s: float = 0.0
    step_s: float = 0.0
    handing_over: bool = False
    leaving: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether its function has loaded the model."""
        return self.line is not None and self.line.ready

    @property
    def is_open(self) -> bool:
        """Whether it can be given orders."""
        return self.is_ready and not self.is_closing

    @property
    def is_closing(self) -> bool:
        """Whether its function is about to leave."""
        return self.line is not None and self.line.is_closing


class FunctionFleet:
    """Starts functions like `spec` on `platform`. Their lines tell what they hear into `told`."""

    def __init__(
        self,
        spec: ServerFunctionSpec,
        platform: Platform,
        storage: Storage,
        told: Told,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._platform, self._storage, self._told, self._clock = spec, platform, storage, told, clock
        self._looked_s = float("-inf")
        self._statuses: dict[FunctionLine, Status] = {}
        self.seats: dict[str, Seat] = {}
        self.lines: list[FunctionLine] = []

    def join(self, worker: ServerWorker) -> None:
        """Start a worker; waits while the platform is busy. Raises PlatformError or PlatformRefused."""
        seat = self.seats[worker.name] = Seat(worker)
        seat.line = self._invoke(seat, patient=True)

    def leave(self, name: str) -> None:
        """Let a worker end what it has; no function follows."""
        seat = self.seats[name]
        seat.leaving = True
        self._end_if_idle(seat)

    def look(self) -> list[Lost]:
        """See now and then which functions have ended or are silent; what was lost."""
        now_s = self._clock()
        if now_s - self._looked_s < _LOOK_S:
            return []
        self._looked_s = now_s
        found = [self._look_at(line, now_s) for line in self.lines if not line.over and not line.has_ended]
        return [lost for lost in found if lost is not None]

    def start_due(self) -> None:
        """Start the functions that are due: in place of others that have gone, and successors of those that will."""
        now_s = self._clock()
        for seat in list(self.seats.values()):
            if seat.restart_at_s is not None and seat.restart_at_s <= now_s:
                self._restart(seat)
            elif self._needs_successor(seat, now_s):
                self._start_successor(seat, now_s)

    def answered(self, line: FunctionLine, message: FunctionMessage) -> Lost | None:
        """A function is ready, or has answered an order, and maybe leaves: who has its place now, and what it left."""
        seat = self._seat_of(line)
        if message.leaves:
            line.close()
        if seat is None:
            return None
        if message.number:
            seat.restarts = 0
            seat.step_s = max(seat.step_s, message.pull_s + message.compute_s)
        lost = self._left(seat, line) if message.leaves else None
        if line is seat.line and line.ready:
            seat.handing_over = False
        successor = seat.successor
        if successor is not None and successor.ready and (seat.line is None or not seat.line.given):
            if seat.line is not None:
                seat.line.end()
            seat.line, seat.successor, seat.handing_over = successor, None, False
        self._end_if_idle(seat)
        return lost

    def ended(self, line: FunctionLine) -> Lost | None:
        """A function has ended without a word: what it was given. Raises WorkerFailed if it was out of memory."""
        status = self._statuses.get(line)
        reason = (status.reason if status is not None else "") or "its function ended without a word"
        if status is not None and status.cause is Cause.OUT_OF_MEMORY:
            raise self.out_of_memory(line, reason)
        return self.lose(line, reason)

    def lose(self, line: FunctionLine, reason: str) -> Lost | None:
        """Expect nothing more of a function; what was given to it, if it was a worker."""
        line.close()
        seat, now_s = self._seat_of(line), self._clock()
        if seat is None:
            return None
        seat.restarts += 1
        pause_s = RESTART_PAUSES.pause_s(seat.restarts - 1) if seat.restarts > 1 else 0.0
        if line is seat.successor:
            _log.warning("the successor of worker %s is lost: %s", seat.worker.name, reason)
            seat.successor, seat.successor_at_s = None, now_s + pause_s
            return None
        seat.line, seat.successor, seat.handing_over = seat.successor, None, False
        if seat.line is None:
            self._plan_restart(seat, now_s + pause_s)
        return Lost(worker=seat.worker.name, chunks=_chunks(line), reason=reason)

    def out_of_memory(self, line: FunctionLine, reason: str) -> WorkerFailed:
        """The error that ends a run whose functions are too small."""
        return WorkerFailed(
            f"worker {line.spec.worker}, a function of {line.spec.memory_mb} MB, holds the whole model and has run out "
            f"of memory: {reason}; take functions of more memory, or a smaller micro-batch"
        )

    def stop(self) -> None:
        """End all functions that are not known to have ended."""
        running = [line for line in self.lines if not line.over and not line.has_ended]
        for line in self.lines:
            line.close()
        stop_functions(self._platform, [line.handle for line in running])
        for line in self.lines:
            line.join()

    def _invoke(self, seat: Seat, *, patient: bool = False) -> FunctionLine:
        spec = replace(self._spec, worker=seat.worker.name, attempt=seat.attempts)
        handle = invoke_with_retry(self._platform, spec) if patient else self._platform.invoke(spec)
        seat.attempts += 1
        _log.info("started function %s as attempt %d of worker %s", handle.name, spec.attempt, spec.worker)
        line = FunctionLine(spec, handle, self._storage, self._told, clock=self._clock)
        self.lines.append(line)
        return line

    def _look_at(self, line: FunctionLine, now_s: float) -> Lost | None:
        status = self._platform.status(line.handle)
        if status.state is not State.RUNNING:
            self._statuses[line] = status
            line.function_ended()
            return None
        reason = self._silence(line, now_s)
        if reason is None:
            return None
        stop_functions(self._platform, [line.handle])
        return self.lose(line, reason)

    def _silence(self, line: FunctionLine, now_s: float) -> str | None:
        """Why a function that seems to run counts as lost, if it does."""
        start_s, answer_s = self._platform.spec.cold_start_s + _START_S, self._spec.message_deadline_s
        if not line.ready and now_s - line.began_s > start_s:
            return f"its function was not ready {start_s:.0f} s after it was invoked"
        if line.given and now_s - min(given.at_s for given in line.given.values()) > answer_s:
            return f"its function has not answered for {answer_s:g} s (message_deadline_s)"
        return None

    def _needs_successor(self, seat: Seat, now_s: float) -> bool:
        if seat.line is None or seat.successor is not None or seat.leaving or now_s < seat.successor_at_s:
            return False
        return now_s + overlap_s(self._platform.spec.cold_start_s, seat.step_s) >= seat.line.leaves_at_s

    def _start_successor(self, seat: Seat, now_s: float) -> None:
        try:
            seat.successor = self._invoke(seat)
        except (PlatformError, PlatformRefused) as error:
            _log.warning("no successor of worker %s could be started: %s", seat.worker.name, error)
            seat.successor_at_s = now_s + RESTART_PAUSES.pause_s(1)

    def _restart(self, seat: Seat) -> None:
        seat.restart_at_s = None
        try:
            seat.line = self._invoke(seat)
        except PlatformError as error:
            _log.warning("worker %s could not be started again: %s", seat.worker.name, error)
            seat.restarts, seat.handing_over = seat.restarts + 1, False
            self._plan_restart(seat, self._clock() + RESTART_PAUSES.pause_s(seat.restarts))

    def _plan_restart(self, seat: Seat, at_s: float) -> None:
        if seat.leaving or seat.restarts > MAX_RESTARTS:
            _log.warning("worker %s gets no other function", seat.worker.name)
            del self.seats[seat.worker.name]
        else:
            seat.restart_at_s = at_s

    def _left(self, seat: Seat, line: FunctionLine) -> Lost | None:
        """A function has left in time."""
        if line is seat.successor:
            seat.successor = None
        elif line is seat.line:
            seat.line, seat.successor = seat.successor, None
            seat.handing_over = not seat.leaving and not seat.is_ready
            if seat.line is None:
                self._plan_restart(seat, self._clock())
        chunks = _chunks(line)
        reason = "its function left, as its life was over, before it could compute what it was given"
        return Lost(worker=seat.worker.name, chunks=chunks, reason=reason) if chunks else None

    def _end_if_idle(self, seat: Seat) -> None:
        if seat.leaving and seat.worker.name in self.seats and not (seat.line is not None and seat.line.given):
            for line in (seat.line, seat.successor):
                if line is not None and not line.over:
                    line.end()
            del self.seats[seat.worker.name]

    def _seat_of(self, line: FunctionLine) -> Seat | None:
        """The place of a function; None if another has it by now."""
        seat = self.seats.get(line.spec.worker)
        return seat if seat is not None and line in (seat.line, seat.successor) else None


def _chunks(line: FunctionLine) -> tuple[Chunk, ...]:
    return tuple(given.chunk for given in line.given.values())
