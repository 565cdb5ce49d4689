"""Times to ask for an object that may not exist yet, as every empty request costs time and money.

Messages of the same name come once a step, so the last steps predict the next: counted from the beginning of
the step, or from when the reader began to wait, whichever varies less. It is asked for at the earliest of those times,
and then again and again; an empty request costs so little money that a late answer costs more.

Only long waits, as for a function that starts again, are asked less and less often. Who asks every p seconds of a wait
of t seconds makes t / p empty requests of g dollars each, and then reads the message p / 2 seconds late, during which
functions for u dollars a second have to wait. Together that is least for p = sqrt(2 g t / u): for S3's gets ($4e-7)
and eight functions of 2 GB ($2.7e-4 a second) 0.17 s after 10 s, and 0.4 s after a minute.

A message that is there at the first request may have been there for long. So the next one is expected earlier, and
earlier still each time; otherwise one late answer would make all functions late for good.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

_REMEMBERED_STEPS = 4
_LONG_S = 10.0
"""A message that is so late comes from a function in trouble; till then others soon come that are late with it."""

_LEAST_LONG_S, _MOST_LONG_S = 0.2, 1.0
"""The shortest and the longest pause in a long wait."""

_STEADY_STEPS = 3  # found at the first request, before the next is expected much earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalEstimator:
    """The pauses between requests, and `deadline_s`, the longest wait in all. All pauses are in seconds.

    A pause is a share of a time: `due_share` of the expected time when a message is nearly due, `late_share` of the
    delay when it is late or nothing is known of it (at most `most_s`), at least `spread_share` of the spread while it
    is no later than usual, and never less than `least_s`. After a message that was there at the first request, the next
    is expected earlier by `early_share` of its time or by `early_trips` round trips, whichever is more.

    A request in vain costs `empty_get_usd`, and the functions that a late message holds up `idle_usd_s` a second.
    """

    deadline_s: float
    least_s: float = 0.0005
    most_s: float = 0.1
    late_share: float = 0.25
    due_share: float = 0.005
    spread_share: float = 0.5
    early_share: float = 0.002
    early_trips: float = 1.5
    empty_get_usd: float = 0.0
    idle_usd_s: float = 0.0

    def pause_s(self, since_s: float, due_s: float = 0.0, spread_s: float = 0.0, trip_s: float = 0.0) -> float:
        """Return the pause, after `since_s`, for a message that mostly comes from `due_s` to `due_s` + `spread_s`.

        The empty request before took `trip_s`, which counts as part of the pause.
        """
        if due_s - since_s > self.least_s:
            return due_s - since_s
        late_s = max(since_s - due_s, 0.0)
        if late_s >= _LONG_S:
            return max(self._long_pause_s(late_s) - trip_s, self.least_s)
        pause_s = max(self.due_share * due_s, min(self.late_share * late_s, self.most_s))
        if late_s < spread_s:
            pause_s = max(pause_s, self.spread_share * spread_s)
        return max(pause_s - trip_s, self.least_s)

    def _long_pause_s(self, late_s: float) -> float:
        """Return the pause that costs least in a wait for what is `late_s` late already."""
        if not self.idle_usd_s:
            return _LEAST_LONG_S
        return min(max(sqrt(2 * self.empty_get_usd * late_s / self.idle_usd_s), _LEAST_LONG_S), _MOST_LONG_S)


@dataclass(frozen=True, slots=True)
class Due:
    """The expected time of a message: first after `due_s`, last after `due_s` + `spread_s`, both since `start_s`."""

    start_s: float
    due_s: float = 0.0
    spread_s: float = 0.0


class Expectation:
    """The arrivals of the last messages of one name, in seconds since each of several starts (step, wait)."""

    def __init__(self, estimator: ArrivalEstimator) -> None:
        self._estimator = estimator
        self._came_s: deque[tuple[float, ...]] = deque(maxlen=_REMEMBERED_STEPS)
        self._found_at_once = 0
        self._trip_s = 0.0

    def due(self, starts_s: Sequence[float]) -> Due:
        """Return when the next is due, since the start from which it varies least, or earlier by another start."""
        if not self._came_s:
            return Due(starts_s[0])
        by_start = zip(starts_s, zip(*self._came_s, strict=True), strict=True)
        seen = [(max(came) - min(came), min(came), start) for start, came in by_start]
        spread_s, first_s, start_s = min(seen)
        last_s = min(start + first + spread for spread, first, start in seen) - start_s
        due_s = max(min(first_s, last_s), 0.0)
        return Due(start_s, due_s, max(first_s + spread_s - due_s, 0.0))

    def learn(self, starts_s: Sequence[float], empty_s: float | None, came_s: float, trip_s: float = 0.0) -> None:
        """A message was there at `came_s` but not at `empty_s`, when the last empty request was made, in `trip_s`.

        Without an empty request (None), the message may have been there for long: expect the next one earlier.
        """
        if empty_s is None:
            growth = 2 ** max(self._found_at_once - _STEADY_STEPS, 0)
            trips_s = self._estimator.early_trips * self._trip_s
            since_s = [came_s - start for start in starts_s]
            self._came_s.append(
                tuple(max(s - growth * max(self._estimator.early_share * s, trips_s), 0.0) for s in since_s)
            )
            self._found_at_once += 1
            return
        self._found_at_once = 0
        self._trip_s = trip_s
        known_s = came_s - empty_s
        came_s -= known_s / 2 if known_s > 2 * trip_s else known_s / 4
        self._came_s.append(tuple(came_s - start for start in starts_s))
