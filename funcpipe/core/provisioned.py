"""The price of functions that a platform keeps ready for a run, beside those that it starts on demand."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from funcpipe.core import checks

SPREAD = 0.5
"""The share of a function's life over which the first hand-overs of a run on such functions are spread.

Functions that handed over together would need twice as many kept ready, or run their successors on demand.
"""

_LONGER = 0.25
"""The share by which a run may take longer than expected before its functions are released without a client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionedTerms:
    """What functions cost that are kept ready, as shares of the price of a size on demand.

    Each costs `ready` of it from the request until its release, in whole periods of `period_s`, and `used` more while
    it runs. All are there `ready_s` after the request.
    """

    ready: float
    used: float
    period_s: float
    ready_s: float

    def __post_init__(self) -> None:
        checks.all_at_least(self, 0, "ready", "used", "ready_s")
        checks.positive("period_s", self.period_s)

    def share(self, run_s: float, *, spare: float) -> float:
        """Return what a second of a function costs in a run of `run_s`, as a share of its price on demand.

        All functions are kept ready for the run, and for each one `spare` more, into which successors start.
        """
        kept_s = math.ceil((self.ready_s + run_s) / self.period_s) * self.period_s
        return self.used + self.ready * (1 + spare) * kept_s / run_s

    def released_after_s(self, run_s: float) -> float:
        """Return the seconds after the request at which functions are released, whatever becomes of the client."""
        return self.ready_s + (1 + _LONGER) * run_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioned:
    """Functions that are kept ready for a run: what they cost, as a `share` of their price on demand, and how long.

    Of each size there are so many to `spare`, for hand-overs. They are released after `released_after_s` at the latest.
    """

    share: float
    spare: Mapping[str, int]
    released_after_s: float


def spare_functions(functions: int, *, run_s: float, life_s: float | None, beside_s: float) -> int:
    """Return how many of `functions`, which live `life_s`, run beside their successors at most, each for `beside_s`.

    They hand over one after the other, evenly within SPREAD of a life: see `first_life`.
    """
    if life_s is None or run_s <= (1 - SPREAD) * life_s:
        return 0
    return min(functions, math.floor(functions * beside_s / (SPREAD * life_s)) + 1)


def first_life(position: int, functions: int) -> float:
    """Return the share of its life after which the first function at `position` of `functions` hands over."""
    return 1 - SPREAD * position / functions
