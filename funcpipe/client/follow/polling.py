"""A client's polls of the storage for the next step of a run.

Every question is a request, and no function waits for the answer: a step that is seen late costs nothing. So the pauses
are about as long as steps take, and shorter only at first, as long as that is unknown.
"""

import time
from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")

SUPERVISE_S = 0.1
"""Pause between two polls of functions; platforms are asked no more often than they can bear."""

_FIRST_S, _LEAST_MOST_S, _MOST_S = 0.05, 0.2, 5.0
_LATE_SHARE = 0.25
"""The share of a step's time so far by which its end may be seen late."""


class StepPolls:
    """The polls until a step has ended, with pauses that depend on how long steps take, up to `heartbeat_s`."""

    def __init__(
        self,
        heartbeat_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._sleep = sleep
        self._seen_s: float | None = None
        self._steps = 0
        self._step_s = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step, as far as this client has seen steps end; 0 is unknown."""
        return self._step_s

    def now_s(self) -> float:
        """The time by the clock of the pauses."""
        return self._clock()

    def pause_s(self, waited_s: float) -> float:
        """Seconds to pause before the next poll, when the end of a step has been waited for so long."""
        most_s = min(max(self._step_s, _LEAST_MOST_S) if self._step_s else _MOST_S, _MOST_S, self._heartbeat_s)
        return min(max(_LATE_SHARE * waited_s, self._step_s / 2, _FIRST_S), most_s)

    def until(self, find: Callable[[], _Found | None], meanwhile: Callable[[], None]) -> tuple[_Found, bool]:
        """Call `find` until it finds something; return that, and True if it had to be waited for.

        `meanwhile` is called every SUPERVISE_S; an error that it raises ends the wait.
        """
        began_s, waited = self._clock(), False
        while (found := find()) is None:
            waited = True
            ends_s = self._clock() + self.pause_s(self._clock() - began_s)
            while (left_s := ends_s - self._clock()) > 0:
                meanwhile()
                self._sleep(min(left_s, SUPERVISE_S))
        return found, waited

    def step_ended(self, *, waited: bool) -> None:
        """A step was seen to have ended; only if it was `waited` for, it has ended just now."""
        self._steps += 1
        if not waited:
            return
        now_s = self._clock()
        if self._seen_s is not None:
            self._step_s = (now_s - self._seen_s) / self._steps
        self._seen_s, self._steps = now_s, 0
