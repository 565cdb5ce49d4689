"""When to ask for an object that has not come yet, where every vain request costs time and money.

Messages of the same name come once a step. So the last steps tell when the next is due: in seconds since the step
began, and since the reader began to wait for it, whichever varies less. It is asked for at the earliest of those times,
and then again and again: each vain request costs a round trip, and so little money that waiting is dearer. When a
message was there at the first request, nothing tells how long it had lain there: the next is expected earlier, lest all
functions settle for what one of them was late with once.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_REMEMBERED = 4  # steps
_STEADY = 3  # so many in time, before expecting them much earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalEstimator:
    """How long to wait in all and, of the time so far or expected, how large a share to pause for.

    `due_share` is for what is nearly due, `late_share` for what is late or of which nothing is known, `spread_share` is
    of the time within which it mostly comes. When the last was there at once, the next is expected earlier by
    `early_share` of its time or `early_trips` round trips.
    """

    deadline_s: float
    least_s: float = 0.0005
    most_s: float = 0.1
    late_share: float = 0.25
    due_share: float = 0.005
    spread_share: float = 0.5
    early_share: float = 0.002
    early_trips: float = 1.5

    def pause_s(self, since_s: float, due_s: float = 0.0, spread_s: float = 0.0, trip_s: float = 0.0) -> float:
        """How long to pause, after `since_s`, for what mostly comes between `due_s` and `due_s` + `spread_s`.

        A vain request takes `trip_s`, which counts as part of the pause.
        """
        if due_s - since_s > self.least_s:
            return due_s - since_s
        late_s = max(since_s - due_s, 0.0)
        share_s = max(self.due_share * due_s, min(self.late_share * late_s, self.most_s))
        if late_s < spread_s:
            share_s = max(share_s, self.spread_share * spread_s)
        return max(share_s - trip_s, self.least_s)


@dataclass(frozen=True, slots=True)
class Due:
    """What is expected: in seconds since `start_s`, when to ask first, and for how long after that messages came."""

    start_s: float
    due_s: float = 0.0
    spread_s: float = 0.0


class Expectation:
    """When messages of one name came, in seconds since each of the times at which it could be told that they would."""

    def __init__(self, patience: ArrivalEstimator) -> None:
        self._patience = patience
        self._came_s: deque[tuple[float, ...]] = deque(maxlen=_REMEMBERED)
        self._in_time = 0
        self.trip_s = 0.0

    def due(self, starts_s: Sequence[float]) -> Due:
        """When the next is due, after the start since which it varies least, but not later than after any of them."""
        if not self._came_s:
            return Due(starts_s[0])
        by_start = zip(starts_s, zip(*self._came_s, strict=True), strict=True)
        seen = [(max(came) - min(came), min(came), start) for start, came in by_start]
        spread_s, first_s, start_s = min(seen)
        last_s = min(start + first + spread for spread, first, start in seen) - start_s
        due_s = max(min(first_s, last_s), 0.0)
        return Due(start_s, due_s, max(first_s + spread_s - due_s, 0.0))

    def learn(self, starts_s: Sequence[float], vain_s: float | None, came_s: float, trip_s: float = 0.0) -> None:
        """A message was there at `came_s`, and not yet at `vain_s`, if that was asked, which took `trip_s`.

        If the first request succeeded, the message may have lain there for long: ask earlier, and ever more so.
        """
        if vain_s is None:
            growth = 2 ** max(self._in_time - _STEADY, 0)
            trips_s = self._patience.early_trips * self.trip_s
            since_s = [came_s - start for start in starts_s]
            self._came_s.append(
                tuple(max(s - growth * max(self._patience.early_share * s, trips_s), 0.0) for s in since_s)
            )
            self._in_time += 1
            return
        self._in_time = 0
        self.trip_s = trip_s
        known_s = came_s - vain_s
        came_s -= known_s / 2 if known_s > 2 * trip_s else known_s / 4
        self._came_s.append(tuple(came_s - start for start in starts_s))
