"""The use of a function's time, second by second, from its invocation to its report."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from funcpipe.core import Event, Use
from funcpipe.core.trace import uses_of
from funcpipe.platforms.base import Invoked


class TimeAccount:
    """The time of one function since it was `invoked`, by use; `clock` is that of its events."""

    def __init__(self, invoked: Invoked, clock: Callable[[], float] = time.time) -> None:
        self._invoked = invoked
        self._clock = clock
        self._seconds = dict.fromkeys(Use, 0.0)
        self.first_step: int | None = None

    def begin(self, step: int) -> None:
        """The function is ready for its first step, which is `step`."""
        if self.first_step is None:
            self.first_step = step
            self._seconds[Use.START] = self._invoked.billed_s

    @contextlib.contextmanager
    def step(self) -> Iterator[Callable[[Sequence[Event]], None]]:
        """Account for a step; yields what to call with its events once it has ended, without which it is lost."""
        began_s, at_s = time.monotonic(), self._clock()
        ended: list[Sequence[Event]] = []
        try:
            yield ended.append
        finally:
            seconds = time.monotonic() - began_s
            if not ended:
                self._seconds[Use.LOST] += seconds
            for events in ended:
                self._add(events, at_s, seconds)

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        """Account for a validation."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._seconds[Use.VALIDATION] += time.monotonic() - began_s

    def uses(self, alive_s: float) -> dict[str, float]:
        """Return the `alive_s` seconds for which the function is billed, by the names of uses."""
        if self.first_step is None:
            return {Use.START.value: alive_s}
        rest_s = max(alive_s - sum(self._seconds.values()), 0.0)
        seconds = {**self._seconds, Use.SAVE: rest_s}
        return {use.value: value for use, value in seconds.items() if value}

    def _add(self, events: Sequence[Event], at_s: float, seconds: float) -> None:
        """Add a step of so many `seconds`, which began `at_s` by the clock of its `events`; that clock may be set."""
        for use, value in uses_of(events, at_s, at_s + seconds).items():
            self._seconds[use] += value
