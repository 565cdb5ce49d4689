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
from typing import Protocol

import numpy as np

from funcpipe.scheduler.simulator.compiled_graph import Array
from funcpipe.scheduler.simulator.folded_graph import FoldedGraph

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


class Queues(Protocol):
    """What the simulators ask for each request."""

    def wait_s(self, task: int, now_s: float) -> float:
        """Let the request of `task` in, which is asked for now; returns for how long it waits."""
        ...


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


def queues_of(limits: RequestLimits) -> RequestQueues | None:
    """Return the queues for a play under `limits`, if there are any."""
    return RequestQueues(limits) if limits.queues else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The queues of a folded graph's requests.

    Those of a task that is made, and of all that it stands for, are `below[task]`, one for each prefix behind that
    number, and `of_store[task]`; -1 stands for none. `prefixes` numbers the prefix of each stage and replica.
    """

    below: Array
    of_store: Array
    prefixes: Array
    interval_s: Sequence[float]

    def of_all(self, folded: FoldedGraph) -> RequestLimits:
        """Return the queues of all tasks."""
        rows = folded.rows
        stages, places = folded.writers[:, rows]
        replicas = np.repeat(np.arange(len(folded.starts) - 1) % folded.replicas, np.diff(folded.starts))
        prefixes = self.prefixes[stages, (replicas + places) % folded.replicas]
        below = np.where(self.below[rows] >= 0, self.below[rows] + prefixes, -1)
        return RequestLimits(queues=(below.tolist(), self.of_store[rows].tolist()), interval_s=self.interval_s)

    def of_mirrors(self, folded: FoldedGraph) -> "MirroredQueues":
        """Return the queues of the tasks that are made, for all that they stand for."""
        spread: dict[tuple[int, int], list[tuple[int, int]]] = {}
        asked: list[tuple[tuple[int, int], ...]] = []
        columns = (self.below, self.of_store, *folded.writers, folded.columns.replicas)
        for below, of_store, stage, places, replica in zip(*(column.tolist() for column in columns), strict=True):
            writer = stage, (replica + places) % folded.turn
            if writer not in spread:
                numbers, counts = np.unique(self.prefixes[stage, writer[1] :: folded.turn], return_counts=True)
                spread[writer] = list(zip(numbers.tolist(), counts.tolist(), strict=True))
            own = [(below + prefix, count) for prefix, count in spread[writer]] if below >= 0 else []
            asked.append((*own, (of_store, folded.mirrors)) if of_store >= 0 else tuple(own))
        return MirroredQueues(asked, self.interval_s)


class MirroredQueues:
    """The queues of one play of a folded graph: of each task's, how many requests come in at once.

    If one of them had to wait, `full` becomes true. Replicas would wait differently long then, and none stands for
    another, so that the play is worth nothing.
    """

    def __init__(self, asked: Sequence[Sequence[tuple[int, int]]], interval_s: Sequence[float]) -> None:
        self.full = False
        self._asked = asked
        self._interval_s = interval_s
        self._next_s = [0.0] * len(interval_s)

    def wait_s(self, task: int, now_s: float) -> float:
        """Let the requests of `task` in; none waits, or the queues are full."""
        for queue, count in self._asked[task]:
            next_s, interval_s = max(self._next_s[queue], now_s), self._interval_s[queue]
            last_s = next_s + (count - 1) * interval_s
            self.full = self.full or last_s - BURST_S > now_s - _ROUNDED_S
            self._next_s[queue] = last_s + interval_s
        return 0.0


_ROUNDED_S = 1e-9
"""By how much sums of intervals may be rounded."""
