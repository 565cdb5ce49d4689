"""A check that an account may run a plan's functions at once, and their successors beside them for a while."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from funcpipe.errors import PlatformRefused

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A limit of `allowed` functions at once, which `limit` names, where a plan needs `needed`.

    `more` is advice to be allowed so many; `fewer`, before a number, advice to plan for at most that many.
    """

    needed: int
    allowed: int
    limit: str
    more: Callable[[int], str]
    fewer: str | None = None

    @property
    def handing_over(self) -> int:
        """The number of functions while all hand over: they begin together, so they leave together."""
        return 2 * self.needed

    def ways_out(self, most: int, wanted: int) -> str:
        """Return the advice: have at most so many functions, or be allowed as many as are wanted."""
        ways = [f"{self.fewer} {most}"] if self.fewer is not None and 0 < most < self.needed else []
        return ", or ".join([*ways, self.more(wanted)])


def check_capacity(capacities: Iterable[Capacity], *, lifetime_s: float | None, run_s: float | None) -> None:
    """Raise PlatformRefused for a plan with more functions than are allowed, and warn where its hand-overs must wait.

    Functions hand over in a run that takes longer than they live, `lifetime_s`. `run_s` is what it is expected to take,
    None where that is unknown. Clouds queue a successor until it may run, so it is enough if one more may.
    """
    for capacity in capacities:
        if capacity.needed > capacity.allowed:
            raise PlatformRefused(
                f"the plan needs {capacity.needed} functions at once, {capacity.limit}; "
                f"{capacity.ways_out(capacity.allowed, capacity.needed)}"
            )
        if lifetime_s is None or (run_s is not None and run_s <= lifetime_s):
            continue
        if capacity.handing_over > capacity.allowed:
            _check_hand_over(capacity, lifetime_s, run_s)


def _check_hand_over(capacity: Capacity, lifetime_s: float, run_s: float | None) -> None:
    """Refuse a run that is known to hand over where not one more function may run, warn of others."""
    becomes = (
        f"each runs beside its successor while it hands over, so that the plan's {capacity.needed} functions become "
        f"up to {capacity.handing_over}"
    )
    ways = f"{capacity.limit}; {capacity.ways_out(capacity.allowed // 2, capacity.handing_over)}"
    when = "if the run takes longer than" if run_s is None else f"the run takes about {run_s:.0f} s, a function at most"
    if run_s is not None and capacity.needed == capacity.allowed:
        raise PlatformRefused(f"{when} {lifetime_s:g} s: {becomes}, and {capacity.needed + 1} at least; {ways}")
    _log.warning(
        "%s %g s: %s; successors wait until functions have ended, up to %d at once, as %s",
        *(when, lifetime_s, becomes, capacity.handing_over - capacity.allowed, ways),
    )
