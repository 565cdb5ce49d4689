"""The use of a function's time: every second in exactly one class."""

import functools
from collections.abc import Sequence
from enum import Enum

from funcpipe.core.trace import Event, Resource


class Use(Enum):
    """The activity of a function at a moment. Where several lanes work at once, the first of these counts.

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
"""The activities within steps."""

_WAIT = _LANES.index(Use.WAIT)
_SYNC = ("split", "merge", "flatten", "tied", "norm")


def uses_of(events: Sequence[Event], begin_s: float, end_s: float) -> dict[Use, float]:
    """Return the seconds from `begin_s` to `end_s` by the activity of the function to which `events` belong.

    A lane *waits* where an object did not exist yet. Transfers that overlap computing cost no time: they are compute.
    """
    changes: list[tuple[float, int, int]] = []
    for event in events:
        begun_s = max(event.start_s + event.waited_s, begin_s)
        until_s = min(event.end_s, end_s)
        if event.waited_s and (wait_end_s := min(begun_s, until_s)) > (wait_s := max(event.start_s, begin_s)):
            changes += ((wait_s, 1, _WAIT), (wait_end_s, -1, _WAIT))
        if until_s > begun_s:
            number = _number_of(event.task.partition(".")[0], event.lane)
            changes += ((begun_s, 1, number), (until_s, -1, number))
    changes.sort()
    running, found, now_s = [0] * len(_LANES), [0.0] * len(IN_STEPS), begin_s
    current = idle = len(_LANES)
    for at_s, change, number in changes:
        found[current] += at_s - now_s
        now_s = at_s
        running[number] += change
        if number <= current:
            current = next((i for i in range(number, idle) if running[i]), idle)
    found[idle] += end_s - now_s
    return dict(zip(IN_STEPS, found, strict=True))


@functools.cache
def _number_of(kind: str, lane: Resource) -> int:
    """Return the index in `_LANES` of tasks of a kind."""
    if lane is Resource.LOAD:
        return _LANES.index(Use.LOAD)
    if lane is Resource.MERGE or any(word in kind for word in _SYNC):
        return _LANES.index(Use.SYNC)
    return _LANES.index(Use.TRANSFER if lane in (Resource.UPLOAD, Resource.DOWNLOAD) else Use.COMPUTE)
