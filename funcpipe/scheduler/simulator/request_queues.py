"""Requests that wait because their store takes so many a second.

A store's prefix, or the store as a whole, is a queue: it lets requests in one after the other, in the order in which
they are asked for. Up to `BURST_S` seconds' worth of them come in at once, after as long a rest.

By hand: a prefix takes 10 requests a second, so a burst of 1. Three are asked for at 0 s. They are let in at 0, 0.1 and
0.2 s less the burst, at which the second is let in at once too: at 0, 0 and 0.1 s.

>>> limits = RequestLimits(queues=([0, 0, 0],), interval_s=[0.1])
>>> queues = RequestQueues(limits)
>>> [round(queues.wait_s(task, 0.0), 3) for task in range(3)]
[0.0, 0.0, 0.1]
"""

from collections.abc import Sequence
from dataclasses import dataclass

BURST_S = 0.1
"""For how long a queue that has rested lets in whatever comes, by what it takes in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The queues of requests: each of `queues` has one for each task of a graph, or -1 for none, and `interval_s` the
    seconds between two requests of each queue.
    """

    queues: tuple[Sequence[int], ...] = ()
    interval_s: Sequence[float] = ()


UNLIMITED = RequestLimits()


class RequestQueues:
    """The queues of one play."""

    def __init__(self, limits: RequestLimits) -> None:
        self._queues = limits.queues
        self._interval_s = limits.interval_s
        self._next_s = [0.0] * len(limits.interval_s)

    def wait_s(self, task: int, now_s: float) -> float:
        """Let the request of `task` in, which is asked for now; returns for how long it waits."""
        own = [queue[task] for queue in self._queues if queue[task] >= 0]
        begin_s = max([now_s, *(self._next_s[number] - BURST_S for number in own)])
        for number in own:
            self._next_s[number] = max(self._next_s[number], begin_s) + self._interval_s[number]
        return begin_s - now_s
