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
    """

    first_s: float
    most_s: float
    draw: Callable[[], float] = random.SystemRandom().random

    def __post_init__(self) -> None:
        checks.positive("first_s", self.first_s)
        checks.at_least("most_s", self.most_s, self.first_s)

    def pause_s(self, tries: int) -> float:
        """Return the pause after so many tries."""
        return self.draw() * min(self.first_s * 2.0 ** min(tries - 1, _MOST_DOUBLINGS), self.most_s)
