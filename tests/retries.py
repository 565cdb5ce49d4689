"""Retries by a clock that only pauses advance."""

from dataclasses import dataclass, field

from funcpipe.core.backoff import Backoff
from funcpipe.platforms.base import Storage
from funcpipe.platforms.wrappers import Retried


@dataclass
class Pauses:
    """A clock, and the pauses that were made by it."""

    made: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.made.append(seconds)

    def now_s(self) -> float:
        return sum(self.made)


def retried(
    store: Storage,
    *,
    deadline_s: float = 0.7,
    first_s: float | None = None,
    pauses: Pauses | None = None,
    draw: float = 1.0,
    most_s: float = 5.0,
) -> Retried:
    """Pauses are 0.1 s, 0.2 s, 0.4 s …, or the share `draw` of them."""
    told = Pauses() if pauses is None else pauses
    backoff = Backoff(first_s=0.1, most_s=most_s, draw=lambda: draw)
    return Retried(store, deadline_s=deadline_s, first_s=first_s, backoff=backoff, clock=told.now_s, sleep=told.sleep)
