"""Where a function's time goes: every second in exactly one class."""

from collections.abc import Sequence
from enum import Enum

from funcpipe.core.trace import Event, Resource


class Use(Enum):
    """What a function does at a moment. Where several lanes work at once, the first of these counts.

    Lanes do nothing in a *bubble*. What follows it is not part of a step that ended: validations; saving, with all else
    between steps and after the last, such as handing over; starting, up to the first step; and steps that did not end.
    """

    COMPUTE = "compute"
    SYNC = "synchronisation"
    TRANSFER = "transfer"
    LOAD = "loading"
    WAIT = "wait"
    BUBBLE = "bubble"
    VALIDATION = "validation"
    SAVE = "saving"
    START = "start"
    LOST = "lost"


_LANES = (Use.COMPUTE, Use.SYNC, Use.TRANSFER, Use.LOAD, Use.WAIT)
IN_STEPS = (*_LANES, Use.BUBBLE)
"""What functions do in steps."""

_NUMBERS = {use: number for number, use in enumerate(_LANES)}
_SYNC = ("split", "merge", "flatten", "tied", "norm")


def uses_of(events: Sequence[Event], begin_s: float, end_s: float) -> dict[Use, float]:
    """The seconds from `begin_s` to `end_s` by what one function, to which `events` happen, does in them.

    A lane *waits* where an object did not exist yet. Transfers that overlap computing cost no time: they are compute.
    """
    changes: list[tuple[float, int, int]] = []
    for event in events:
        begun_s = event.start_s + event.waited_s
        for use, from_s, to_s in ((Use.WAIT, event.start_s, begun_s), (_use_of(event), begun_s, event.end_s)):
            from_s, to_s = max(from_s, begin_s), min(to_s, end_s)
            if to_s > from_s:
                changes += [(from_s, 1, _NUMBERS[use]), (to_s, -1, _NUMBERS[use])]
    changes.sort()
    running, found, now_s = [0] * len(_LANES), [0.0] * (len(_LANES) + 1), begin_s
    for at_s, change, number in changes:
        current = next((i for i, lanes in enumerate(running) if lanes), len(_LANES))
        found[current] += at_s - now_s
        now_s = at_s
        running[number] += change
    found[-1] += end_s - now_s
    return dict(zip(IN_STEPS, found, strict=True))


def _use_of(event: Event) -> Use:
    if event.lane is Resource.LOAD:
        return Use.LOAD
    if event.lane is Resource.MERGE or any(word in event.task.partition(".")[0] for word in _SYNC):
        return Use.SYNC
    return Use.TRANSFER if event.lane in (Resource.UPLOAD, Resource.DOWNLOAD) else Use.COMPUTE
