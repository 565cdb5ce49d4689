"""All ways of synchronising that a stage may choose from, and how long each takes for each of many stages.

More requests buy fewer seconds: of ways that take as many requests, only the fastest counts, and a way counts only if
it is faster than all that take fewer. So the seconds of a row of `WayTable` fall from left to right, and its dollars
rise. By hand, for four replicas: all-reduce takes 4 puts and 6 gets, an exchange in one round 4 and 12. If all-reduce
takes 9 s and the exchange 7 s, both count; if the exchange takes 10 s, its column says 9 s and nobody chooses it.

Where a store costs by the byte, an exchange of the same number of requests costs more for a larger gradient, and where
it takes no large objects, some ways are only for small ones: then each stage has an order of its own. Ways are counted
by their dollars, here as everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from funcpipe.core import Sync, SyncWay, usual_streams
from funcpipe.partitioner.cost.arrays import Array, BoolArray, IntArray
from funcpipe.partitioner.cost.formulas import tied_times
from funcpipe.partitioner.cost.loads import Loads, Setting
from funcpipe.partitioner.cost.stores import largest_shares, link, way_fits, way_usd
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WayTable:
    """For stages (rows) and ways (columns) the least seconds with no more dollars for storage than the column's.

    Seconds include those for the gradients of tied parameters, as `formulas.sync_times`. Rows come in groups of
    `grouped`, the sizes of one stage: a group has a row of `usd`, which rises along the columns, and of `number`, the
    place of each column's way in `ways`. Where only requests cost anything, all stages share one row of these.
    """

    ways: tuple[SyncWay, ...]
    number: IntArray
    usd: Array
    seconds: Array
    grouped: int

    @property
    def columns(self) -> int:
        """How many ways each stage may choose from at most."""
        return int(self.seconds.shape[1])

    @property
    def least_s(self) -> Array:
        """The fastest way of each stage."""
        least: Array = self.seconds[:, -1]
        return least

    def way(self, row: int, column: int) -> SyncWay:
        """The way of a stage in a column."""
        return self.ways[int(self.number[self._group(row), column])]

    def usd_of(self, row: IntArray, column: IntArray | int) -> Array:
        """Dollars of these stages in these columns, element by element."""
        usd: Array = self.usd[self._group(row), column]
        return usd

    def usd_rows(self, row: IntArray) -> Array:
        """Dollars of these stages in all columns; a single row where they are the same for all."""
        return self.usd if len(self.usd) == 1 else self.usd[row // self.grouped]

    def _group(self, row: Any) -> Any:
        return 0 if len(self.usd) == 1 else row // self.grouped


def any_way_fits(loads: Loads, setting: Setting) -> BoolArray:
    """Which stages have a way of synchronising whose objects fit the store."""
    largest = setting.sum_store.largest_bytes
    if largest is None or setting.replicas == 1:
        return np.ones_like(loads.summed_bytes, dtype=bool)
    raw, merged = _shares(ways_of(setting), setting.replicas)
    least = np.maximum(raw * setting.sync_wire_ratio, merged * setting.merged_wire_ratio).min()
    fits: BoolArray = least * loads.summed_bytes <= largest
    return fits


@lru_cache
def _shares(ways: tuple[SyncWay, ...], replicas: int) -> tuple[Array, Array]:
    raw, merged = zip(*(largest_shares(way, replicas) for way in ways), strict=True)
    return np.array(raw), np.array(merged)


def way_table(loads: Loads, setting: Setting, *, workers: int) -> WayTable:
    """The ways of all stages of `loads`, one row for each, in the order of the flat array."""
    ways, store = ways_of(setting), setting.sum_store
    shape = np.broadcast_shapes(loads.summed_bytes.shape, loads.upload_bytes_s.shape)
    seconds = _seconds(loads, setting, ways, workers)
    if not store.costs_by_byte and (store.largest_bytes is None or setting.replicas == 1):
        usd = np.array([[way_usd(way, loads, setting).item() for way in ways]])
        return _in_order(ways, usd, seconds, grouped=seconds.shape[0])
    stages = (shape[0], 1)
    usd = np.concatenate([np.broadcast_to(way_usd(way, loads, setting), stages) for way in ways], axis=1)
    fits = np.concatenate([np.broadcast_to(way_fits(way, loads, setting), stages) for way in ways], axis=1)
    return _in_order(ways, np.where(fits, usd, np.inf), seconds, grouped=shape[1])


def _in_order(ways: tuple[SyncWay, ...], usd: Array, seconds: Array, *, grouped: int) -> WayTable:
    """The table: for each group the ways in the order of their dollars, without those that are no faster than others.

    Ways with infinite dollars cannot be. A group with fewer ways than others repeats its last one.
    """
    order = np.argsort(usd, axis=1, kind="stable")
    usd = np.take_along_axis(usd, order, axis=1)
    seconds = np.take_along_axis(seconds.reshape(len(usd), grouped, len(ways)), order[:, None], axis=2)
    seconds[np.broadcast_to(np.isinf(usd)[:, None], seconds.shape)] = np.inf
    np.minimum.accumulate(seconds, axis=2, out=seconds)
    faster = np.ones(usd.shape, dtype=bool)
    faster[:, 1:] = (seconds[..., 1:] < seconds[..., :-1]).any(axis=1)
    count = faster.sum(axis=1, keepdims=True)
    place = np.argsort(~faster, axis=1, kind="stable")[:, : count.max(initial=1)]
    place = np.take_along_axis(place, np.minimum(np.arange(place.shape[1]), count - 1), axis=1)
    return WayTable(
        ways=ways,
        number=np.take_along_axis(order, place, axis=1),
        usd=np.take_along_axis(usd, place, axis=1),
        seconds=np.take_along_axis(seconds, place[:, None], axis=2).reshape(-1, place.shape[1]),
        grouped=grouped,
    )


def _seconds(loads: Loads, setting: Setting, ways: Sequence[SyncWay], workers: int) -> Array:
    """Seconds of each way (column) for each stage (row)."""
    up, down = link(loads, setting.sum_store, workers)
    tied_s, backward_s = tied_times(loads, setting, up, down)
    summed = loads.summed_bytes
    columns = np.broadcast_arrays(
        *(setting.sync_wire_ratio * summed, setting.merged_wire_ratio * summed, up, down, tied_s, backward_s)
    )
    size, merged, up, down, tied_s, backward_s = (column.reshape(-1, 1) for column in columns)
    seconds = np.empty((len(size), len(ways)))
    latency_s, replicas = setting.sum_store.latency_s, setting.replicas
    for sync in {way.sync for way in ways}:
        which = [i for i, way in enumerate(ways) if way.sync is sync]
        if sync in (Sync.EXCHANGE, Sync.STREAMED):
            chosen = [usual_streams(sync, replicas, ways[i].streams) for i in which]
            cut = Cut(
                *(np.array(counts) for counts in zip(*((s.rounds, s.groups, s.merged) for s in chosen), strict=True))
            )
            for low in range(0, len(size), _ROWS):
                rows = slice(low, low + _ROWS)
                links = (size[rows], replicas, up[rows], down[rows], latency_s)
                found = exposed_s(sync, *links, cut, backward_s[rows], merged_bytes=merged[rows])
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
