"""What keeps requests and those who wait for them: latencies of puts that are open, polls, and crowds."""

from typing import NamedTuple

import numpy as np

from funcpipe.core import Plan, PlatformSpec
from funcpipe.core.choices import OPEN_UPLOADS
from funcpipe.core.texts import STAGE_PREFIXES
from funcpipe.partitioner.cost import Array, IntArray
from funcpipe.partitioner.cost.stores import UNPACED, pace_of, sync_requests


class Cut(NamedTuple):
    """How a gradient is divided in each of many ways: the counts of `Streams`, along the last axis."""

    rounds: IntArray | int
    groups: IntArray | int
    merged: IntArray | int


def waves_of(puts: Array | IntArray | int) -> Array:
    """Return how often all puts that may be open have ended before the last of `puts` begins."""
    waves: Array = (np.ceil(np.asarray(puts) - 1e-9) - 1) // OPEN_UPLOADS
    return waves


def idle_s(each_s: Array, latency_s: float) -> Array:
    """Seconds between two waves of puts of `each_s` in which no body goes up, because all open ones have a latency.

    Four puts of 1 s are open, with a latency of 10 s: bodies go up from 10 to 14 s, then from 21 to 25 s, and so on; so
    7 s pass idly before each wave but the first.
    """
    idle: Array = np.maximum(latency_s - (OPEN_UPLOADS - 1) * each_s, 0.0)
    return idle


def found_late_s(poll_s: float, awaited: int, moved_s: Array | float = 0.0) -> Array:
    """Return by how much later `awaited` objects have been read that came at once while they were asked for.

    Each is found at any time up to `poll_s` late, so the j-th of k on average j / (k + 1) of that, as numbers drawn
    evenly between 0 and 1, in their order. Their bodies come one after the other, in `moved_s` together, so all have
    come when for some j this one has been found, and its body and those behind it have come: for the first or for the
    last. By hand: of 3 objects the last is found 0.75 s late, the first 0.25 s; if each body takes 0.1 s, two have come
    in the meantime.

    >>> float(found_late_s(1.0, 3)), round(float(found_late_s(1.0, 3, 0.3)), 3), float(found_late_s(1.0, 3, 3.0))
    (0.75, 0.55, 0.25)
    """
    least_s, most_s = poll_s / (awaited + 1), poll_s * awaited / (awaited + 1)
    late_s: Array = np.maximum(most_s - (awaited - 1) / awaited * np.asarray(moved_s), least_s)
    return late_s


def crowd_time_s(plan: Plan, spec: PlatformSpec) -> float | None:
    """Return the seconds in which the store of sums takes all requests of one exchange of `plan`; None without limits.

    Those of a stage are spread over its prefixes, but each replica may ask for the same object. By hand: of 128
    replicas in a tree, 127 get what the first one puts; from a prefix that takes 20 a second, in 6.4 s.
    """
    store, replicas = spec.store(plan.stores.sums), plan.replicas
    if pace_of(store, replicas, plan.workers) is UNPACED or replicas == 1:
        return None
    requests = [sync_requests(way, replicas) for way in plan.ways]
    puts, gets = (max(counts) / min(replicas, STAGE_PREFIXES) for counts in zip(*requests, strict=True))
    of_all = sum(map(sum, requests))
    asked = ((puts, store.puts_s), (max(gets, replicas), store.gets_s), (of_all, store.requests_s))
    return max(count / rate for count, rate in asked if rate is not None)
