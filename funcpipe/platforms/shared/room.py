"""Whether an account has room for a plan's functions, and for their successors, which run beside them for a while."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from funcpipe.errors import PlatformRefused

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Room for `allowed` functions at once, as `place` says, of which a plan needs `needed`.

    `more` tells how to have room for so many; `fewer`, before a number, how to plan for at most that many.
    """

    needed: int
    allowed: int
    place: str
    more: Callable[[int], str]
    fewer: str | None = None

    @property
    def handing_over(self) -> int:
        """How many functions there are while all hand over: they begin together, so they leave together."""
        return 2 * self.needed

    def ways_out(self, most: int, wanted: int) -> str:
        """What to do: have at most so many functions, or room for as many as are wanted."""
        ways = [f"{self.fewer} {most}"] if self.fewer is not None and 0 < most < self.needed else []
        return ", or ".join([*ways, self.more(wanted)])


def check_room(rooms: Iterable[Room], *, lifetime_s: float | None, run_s: float | None) -> None:
    """Raise PlatformRefused for a plan without the room that it needs, and warn where its hand-overs must wait for it.

    Functions hand over in a run that takes longer than they live, `lifetime_s`. `run_s` is what it is expected to take,
    None where nobody knows. Clouds keep a successor in a queue until there is room for it, so room for one is enough.
    """
    for room in rooms:
        if room.needed > room.allowed:
            raise PlatformRefused(
                f"the plan needs {room.needed} functions at once, {room.place}; "
                f"{room.ways_out(room.allowed, room.needed)}"
            )
        if lifetime_s is None or (run_s is not None and run_s <= lifetime_s):
            continue
        if room.handing_over > room.allowed:
            _check_hand_over(room, lifetime_s, run_s)


def _check_hand_over(room: Room, lifetime_s: float, run_s: float | None) -> None:
    """Refuse a run that is known to hand over and has no room for it, warn of others."""
    becomes = (
        f"each runs beside its successor while it hands over, so that the plan's {room.needed} functions become up to "
        f"{room.handing_over}"
    )
    ways = f"{room.place}; {room.ways_out(room.allowed // 2, room.handing_over)}"
    when = "if the run takes longer than" if run_s is None else f"the run takes about {run_s:.0f} s, a function at most"
    if run_s is not None and room.needed == room.allowed:
        raise PlatformRefused(f"{when} {lifetime_s:g} s: {becomes}, and {room.needed + 1} at least; {ways}")
    _log.warning(
        "%s %g s: %s; successors wait until functions have ended, up to %d at once, as %s",
        *(when, lifetime_s, becomes, room.handing_over - room.allowed, ways),
    )
