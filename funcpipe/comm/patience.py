"""When to ask for an object that has not come yet, where every vain request costs time and money.

Messages of the same name come once a step. So the last few waits tell when the next will be over: the first request is
made at the earliest of those times, the second halfway to the latest of them, and later ones with growing pauses.
"""

from collections import deque
from dataclasses import dataclass

_REMEMBERED = 4  # waits for messages of one name


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait in all and, of the wait so far or expected, how large a share to pause for."""

    deadline_s: float
    least_s: float = 0.0005
    most_s: float = 0.1
    late_share: float = 0.25
    due_share: float = 0.03

    def pause_s(self, waited_s: float, due_s: float = 0.0, spread_s: float = 0.0) -> float:
        """How long to pause after `waited_s` for what mostly comes between `due_s` and `due_s` + `spread_s`."""
        left_s = max(self.deadline_s - waited_s, 0.0)
        if due_s - waited_s > self.least_s:
            return min(due_s - waited_s, left_s)
        late_s = max(waited_s - due_s, 0.0)
        shares_s = (self.due_share * due_s, self.late_share * late_s, self.least_s)
        if late_s < spread_s:
            return min(max(spread_s / 2, *shares_s), left_s)
        return min(max(shares_s), max(self.most_s, self.due_share * due_s), left_s)


class Expectation:
    """When messages of one name came, in seconds since they were first wanted."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._waits_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._lucky = 0

    @property
    def due_s(self) -> float:
        """The earliest of the last waits: there is little sense in asking before."""
        return min(self._waits_s, default=0.0)

    @property
    def spread_s(self) -> float:
        """By how much the last waits differed."""
        return max(self._waits_s, default=0.0) - self.due_s

    def learn(self, vain_s: float | None, came_s: float) -> None:
        """A message was there after `came_s`, and not yet after `vain_s`, if that was asked.

        If the first request succeeded, the message may have lain there for long: ask earlier, and ever more so.
        """
        if vain_s is not None:
            self._lucky = 0
            self._waits_s.append((vain_s + came_s) / 2)
            return
        self._waits_s.append(came_s * max(1 - self._patience.due_share * 2**self._lucky, 0.0))
        self._lucky += 1
