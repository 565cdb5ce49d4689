"""Aligns the clocks of different functions by the messages that passed between them.

A get cannot end before its put has ended. If no pair of events contradicts that, the clocks are believed. Otherwise
messages in both directions bound the difference of two clocks from both sides, and the middle is taken, as by Cristian
(1989) and in NTP. Differences are chained along the pairs with the closest bounds, then moved as little as possible
until no message contradicts them. Each clock is assumed to be off by a constant.

For example, worker B's clock is 7 s ahead of A's. A put of A ends at 1.00 and its get by B at 8.03 (slack 7.03); a put
of B ends at 9.00 and its get by A at 2.04 (slack -6.96). So B's clock is between 6.96 and 7.03 s ahead; the middle,
6.995 s, is subtracted from its times.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from funcpipe.core import Event, Resource
from funcpipe.scheduler.tasks import Task, source_of

Worker = tuple[int, int]
Slack = Mapping[tuple[Worker, Worker], float]
"""The shortest time from the end of a put to the end of its get, by writer and reader, each by its worker's clock."""


def aligned(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return `events` by the first worker's clock, in order of their start."""
    corrections = clock_corrections(events)
    moved = []
    for event in events:
        seconds = corrections[event.stage, event.replica]
        moved.append(replace(event, start_s=event.start_s + seconds, end_s=event.end_s + seconds))
    return tuple(sorted(moved, key=lambda event: (event.start_s, event.end_s)))


def clock_corrections(events: Sequence[Event]) -> dict[Worker, float]:
    """Return the seconds to add to the times of each worker."""
    workers = sorted({(event.stage, event.replica) for event in events})
    slack = _slack(events)
    if all(seconds >= 0 for seconds in slack.values()):
        return dict.fromkeys(workers, 0.0)
    found: dict[Worker, float] = {}
    for worker in workers:
        if worker not in found:
            _spread(worker, slack, found)
    for _ in workers:
        for (writer, reader), seconds in slack.items():
            found[reader] = max(found[reader], found[writer] - seconds)
    return {worker: seconds - found[workers[0]] for worker, seconds in found.items()}


def _slack(events: Sequence[Event]) -> Slack:
    written: dict[tuple[int, Task], float] = defaultdict(lambda: math.inf)
    for event in events:
        if event.lane is Resource.UPLOAD:
            key = event.step, Task.parse(event.task)
            written[key] = min(written[key], event.end_s)
    slack: dict[tuple[Worker, Worker], float] = defaultdict(lambda: math.inf)
    for event in events:
        if event.lane is Resource.DOWNLOAD:
            put = source_of(Task.parse(event.task))
            if (event.step, put) in written:
                pair = (put.stage, put.replica), (event.stage, event.replica)
                slack[pair] = min(slack[pair], event.end_s - written[event.step, put])
    return dict(slack)


def _spread(first: Worker, slack: Slack, found: dict[Worker, float]) -> None:
    """Correct the clocks of all workers connected to `first` by messages, the closest bounds first."""
    neighbours = defaultdict(set)
    for writer, reader in slack:
        neighbours[writer].add(reader)
        neighbours[reader].add(writer)
    waiting = [(0.0, first, 0.0)]
    while waiting:
        _, worker, correction = heapq.heappop(waiting)
        if worker in found:
            continue
        found[worker] = correction
        for other in neighbours[worker] - found.keys():
            width, ahead = _between(worker, other, slack)
            heapq.heappush(waiting, (width, other, correction + ahead))


def _between(known: Worker, other: Worker, slack: Slack) -> tuple[float, float]:
    """Return the distance of the bounds on the correction of `other` relative to that of `known`, and their middle.

    Messages in one direction only give one bound: the correction is 0, or the bound where 0 would contradict it.
    """
    low, high = -slack.get((known, other), math.inf), slack.get((other, known), math.inf)
    if math.isinf(low) or math.isinf(high):
        return math.inf, min(max(low, 0.0), high)
    return high - low, (low + high) / 2
