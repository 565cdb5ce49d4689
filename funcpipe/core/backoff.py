"""Pauses between tries of something that fails for now: they grow, and are drawn at random.

Clients that were refused together do not come back together ("full jitter"). The random numbers that a program
seeds are left alone.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from funcpipe.core import checks

_MOST_DOUBLINGS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The pause after try `n`, counted from 1, is drawn between nothing and `first_s`, doubled `n` - 1 times.

    It is never drawn from more than `most_s`. `draw` gives numbers between 0 and 1.

    Where so many come at once to what takes so many a second that all of them can be served in `crowd_s`, pauses that
    only double would leave it idle in the end, when few are left. So a pause is drawn from no more than half of what is
    left of that time, or has passed since. If those who are left are served evenly till then, they come at least four
    times as often as they are served.
    """

    first_s: float
    most_s: float
    crowd_s: float | None = None
    draw: Callable[[], float] = random.SystemRandom().random

    def __post_init__(self) -> None:
        checks.positive("first_s", self.first_s)
        checks.at_least("most_s", self.most_s, self.first_s)

    def pause_s(self, tries: int, waited_s: float = 0.0) -> float:
        """Return the pause after so many tries, of which the first began `waited_s` ago."""
        longest_s = min(self.first_s * 2.0 ** min(tries - 1, _MOST_DOUBLINGS), self.most_s)
        if self.crowd_s is not None:
            longest_s = min(longest_s, max(abs(self.crowd_s - waited_s) / 2, self.first_s))
        return self.draw() * longest_s
