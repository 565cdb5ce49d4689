"""All ways of synchronising that a stage may choose from, and how long each takes for each of many stages.

More requests buy fewer seconds: of ways that take as many requests, only the fastest counts, and a way counts only if
it is faster than all that take fewer. So the seconds of a row of `WayTable` fall from left to right, and its dollars
rise. By hand, for four replicas: all-reduce takes 4 puts and 6 gets, an exchange in one round 4 and 12. If all-reduce
takes 9 s and the exchange 7 s, both count; if the exchange takes 10 s, its column says 9 s and nobody chooses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from funcpipe.core import PlatformSpec, Sync, SyncWay, usual_streams
from funcpipe.partitioner.cost.arrays import Array
from funcpipe.partitioner.cost.formulas import shared_link, tied_times
from funcpipe.partitioner.cost.loads import Loads, Setting
from funcpipe.partitioner.cost.requests import request_usd, sync_requests
from funcpipe.partitioner.cost.sync_choice import candidates
from funcpipe.partitioner.cost.sync_time import Cut, exposed_s, sync_time_s

_ROWS = 48
"""How many rows are computed at a time: few enough for the processor's cache."""


@lru_cache
def all_ways(replicas: int, *, sharded: bool) -> tuple[SyncWay, ...]:
    """The ways from which each stage may choose, those with the fewest requests not first."""
    if replicas == 1:
        return (SyncWay(Sync.PIPELINED),)
    whole = (Sync.THREE_PHASE, Sync.PIPELINED, *(() if sharded else (Sync.ALL_REDUCE,)))
    return (*map(SyncWay, whole), *(SyncWay(*way) for way in candidates(replicas, sharded=sharded)))


def ways_of(setting: Setting) -> tuple[SyncWay, ...]:
    """The ways that stages have under `setting`: its own, or all."""
    if setting.sync is not None:
        return (SyncWay(setting.sync, setting.streams),)
    return all_ways(setting.replicas, sharded=setting.sharded)


def way_usd(way: SyncWay, replicas: int, spec: PlatformSpec) -> float:
    """Dollars for the requests of all replicas of a stage."""
    return float(request_usd(*sync_requests(way, replicas), spec))


@dataclass(frozen=True, slots=True, kw_only=True)
class WayTable:
    """For stages (rows) and ways (columns) the least seconds with no more dollars for requests than the column's.

    Seconds include those for the gradients of tied parameters, as `formulas.sync_times`. `usd` rises along the columns.
    """

    ways: tuple[SyncWay, ...]
    usd: Array
    seconds: Array

    @property
    def least_s(self) -> Array:
        """The fastest way of each stage."""
        least: Array = self.seconds[:, -1]
        return least


def way_table(loads: Loads, setting: Setting, *, workers: int) -> WayTable:
    """The ways of all stages of `loads`, one row for each, in the order of the flat array."""
    ways = ways_of(setting)
    usd = np.array([way_usd(way, setting.replicas, setting.spec) for way in ways])
    order = np.argsort(usd, kind="stable")
    seconds = _seconds(loads, setting, [ways[i] for i in order], workers)
    np.minimum.accumulate(seconds, axis=1, out=seconds)
    faster = np.ones(len(ways), dtype=bool)
    faster[1:] = (seconds[:, 1:] < seconds[:, :-1]).any(axis=0)
    order = order[faster]
    return WayTable(ways=tuple(ways[i] for i in order), usd=usd[order], seconds=seconds[:, faster])


def _seconds(loads: Loads, setting: Setting, ways: Sequence[SyncWay], workers: int) -> Array:
    """Seconds of each way (column) for each stage (row)."""
    up, down = shared_link(loads, setting, workers)
    tied_s, backward_s = tied_times(loads, setting, up, down)
    summed = loads.summed_bytes
    columns = np.broadcast_arrays(
        *(setting.sync_wire_ratio * summed, setting.merged_wire_ratio * summed, up, down, tied_s, backward_s)
    )
    size, merged, up, down, tied_s, backward_s = (column.reshape(-1, 1) for column in columns)
    seconds = np.empty((len(size), len(ways)))
    latency_s, replicas = setting.spec.latency_s, setting.replicas
    for sync in {way.sync for way in ways}:
        which = [i for i, way in enumerate(ways) if way.sync is sync]
        if sync in (Sync.EXCHANGE, Sync.STREAMED):
            chosen = [usual_streams(sync, replicas, ways[i].streams) for i in which]
            cut = Cut(
                *(np.array(counts) for counts in zip(*((s.rounds, s.groups, s.merged) for s in chosen), strict=True))
            )
            for low in range(0, len(size), _ROWS):
                rows = slice(low, low + _ROWS)
                link = (size[rows], replicas, up[rows], down[rows], latency_s)
                found = exposed_s(sync, *link, cut, backward_s[rows], merged_bytes=merged[rows])
                seconds[rows, which] = found if replicas > 1 else 0.0
        else:
            found = sync_time_s(
                sync,
                gradient_bytes=size,
                merged_bytes=merged,
                replicas=replicas,
                upload_bytes_s=up,
                download_bytes_s=down,
                latency_s=latency_s,
            )
            seconds[:, which] = found
    return seconds + tied_s
