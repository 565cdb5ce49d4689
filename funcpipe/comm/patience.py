"""When to ask for an object that has not come yet, where every vain request costs time and money.

Messages of the same name come once a step. So the last steps tell when the next is due: the first request is made at
the latest of those times, but no later than one round trip after the earliest: by asking so much too early, no more
time is lost than by waiting so long.
"""

from collections import deque
from dataclasses import dataclass

_REMEMBERED = 4  # steps
_STEADY = 3  # so many in time, before expecting them much earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait in all and, of the time in the step so far or expected, how large a share to pause for.

    `due_share` is for what is nearly due, `late_share` for what is late or of which nothing is known; by `early_share`
    of it the next is expected earlier when the last was there at once.
    """

    deadline_s: float
    least_s: float = 0.0005
    most_s: float = 0.1
    late_share: float = 0.25
    due_share: float = 0.005
    early_share: float = 0.002

    def pause_s(self, since_s: float, due_s: float = 0.0, spread_s: float = 0.0, trip_s: float = 0.0) -> float:
        """How long to pause, `since_s` into the step, for what mostly comes between `due_s` and `due_s` + `spread_s`.

        A vain request takes `trip_s`, which counts as part of the pause.
        """
        if due_s - since_s > self.least_s:
            return due_s - since_s
        late_s = max(since_s - due_s, 0.0)
        share_s = max(self.due_share * due_s, min(self.late_share * late_s, self.most_s))
        if late_s < spread_s:
            share_s = max(share_s, spread_s / 2)
        return max(share_s - trip_s, self.least_s)


class Expectation:
    """When messages of one name came, in seconds since the step began."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._came_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._in_time = 0
        self.trip_s = 0.0

    @property
    def due_s(self) -> float:
        """When to ask first."""
        if not self._came_s:
            return 0.0
        return min(max(self._came_s), min(self._came_s) + self.trip_s)

    @property
    def spread_s(self) -> float:
        """For how long after that messages came."""
        return max(self._came_s, default=0.0) - self.due_s

    def learn(self, vain_s: float | None, came_s: float, trip_s: float = 0.0) -> None:
        """A message was there after `came_s`, and not yet after `vain_s`, if that was asked, which took `trip_s`.

        If the first request succeeded, the message may have lain there for long: ask earlier, and ever more so.
        """
        if vain_s is None:
            sooner = self._patience.early_share * 2 ** max(self._in_time - _STEADY, 0)
            self._came_s.append(came_s * max(1 - sooner, 0.0))
            self._in_time += 1
            return
        self._in_time = 0
        self.trip_s = trip_s
        known_s = came_s - vain_s
        self._came_s.append(came_s - (known_s / 2 if known_s > 2 * trip_s else known_s / 4))
