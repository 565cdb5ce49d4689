"""The clocks of different functions, set right by the messages that passed between them.

No message is read to its end before it was written. Where that holds already the clocks are believed. Otherwise two
workers that sent each other messages bound the difference of their clocks from both sides; the middle is taken, as by
Cristian (1989) and in NTP, along the pairs with the closest bounds, and then moved as little as the other messages ask.
Clocks are taken to be off by a constant.
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
"""By writer and reader: the shortest time from the end of a put to the end of its get, each by its own clock."""


def aligned(events: Sequence[Event]) -> tuple[Event, ...]:
    """`events` by one clock, the first worker's, in order of their start."""
    corrections = clock_corrections(events)
    moved = []
    for event in events:
        seconds = corrections[event.stage, event.replica]
        moved.append(replace(event, start_s=event.start_s + seconds, end_s=event.end_s + seconds))
    return tuple(sorted(moved, key=lambda event: (event.start_s, event.end_s)))


def clock_corrections(events: Sequence[Event]) -> dict[Worker, float]:
    """What is to be added to the times of each worker."""
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
    """Set the clocks of all that exchange messages with `first`, directly or not, the best known pairs first."""
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
    """How far the bounds on the correction of `other` beside that of `known` lie apart, and their middle.

    With messages in one direction only there is one bound, which is taken where 0 would break it.
    """
    low, high = -slack.get((known, other), math.inf), slack.get((other, known), math.inf)
    if math.isinf(low) or math.isinf(high):
        return math.inf, min(max(low, 0.0), high)
    return high - low, (low + high) / 2
