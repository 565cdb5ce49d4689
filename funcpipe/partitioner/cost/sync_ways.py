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

import numpy as np

from funcpipe.core import Sync, SyncWay, usual_streams
from funcpipe.partitioner.cost.arrays import Array, BoolArray, IntArray
from funcpipe.partitioner.cost.formulas import tied_times
from funcpipe.partitioner.cost.loads import Loads, Setting
from funcpipe.partitioner.cost.stores import largest_shares, link, way_usd
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
    """The least seconds in which stages synchronise (rows) with no more dollars for storage than a column's.

    Stages on sizes that do alike share a row: `row[stage, size]` is theirs. Seconds include those for the gradients of
    tied parameters, as `formulas.sync_times`. Rows come in groups, and `group` has each row's: a group has a row of
    `usd`, which rises along the columns, and of `number`, the place of each column's way in `ways`. A stage is in one
    group on all sizes; where only requests cost anything, there is one group.
    """

    ways: tuple[SyncWay, ...]
    number: IntArray
    usd: Array
    seconds: Array
    group: IntArray
    row: IntArray

    @property
    def columns(self) -> int:
        """How many ways each stage may choose from at most."""
        return int(self.seconds.shape[1])

    def way(self, row: int, column: int) -> SyncWay:
        """The way of a row in a column."""
        return self.ways[int(self.number[self.group[row], column])]

    def usd_of(self, row: IntArray, column: IntArray | int) -> Array:
        """Dollars of these rows in these columns, element by element."""
        usd: Array = self.usd[0 if len(self.usd) == 1 else self.group[row], column]
        return usd

    def usd_rows(self, row: IntArray) -> Array:
        """Dollars of these rows in all columns; a single row where they are the same for all."""
        return self.usd if len(self.usd) == 1 else self.usd[self.group[row]]


def any_way_fits(loads: Loads, setting: Setting) -> BoolArray:
    """Which stages have a way of synchronising whose objects fit the store."""
    fits = _fits(loads.summed_bytes[..., None], setting, ways_of(setting))
    return np.asarray(fits.any(axis=-1))


def _fits(summed_bytes: Array, setting: Setting, ways: tuple[SyncWay, ...]) -> BoolArray:
    """Which ways (last axis) have no object that is too large for the store."""
    largest = setting.sum_store.largest_bytes
    if largest is None or setting.replicas == 1:
        return np.ones((*summed_bytes.shape[:-1], len(ways)), dtype=bool)
    raw, merged = _shares(ways, setting.replicas)
    most = np.maximum(raw * setting.sync_wire_ratio, merged * setting.merged_wire_ratio)
    fits: BoolArray = most * summed_bytes <= largest
    return fits


@lru_cache
def _shares(ways: tuple[SyncWay, ...], replicas: int) -> tuple[Array, Array]:
    raw, merged = zip(*(largest_shares(way, replicas) for way in ways), strict=True)
    return np.array(raw), np.array(merged)


def way_table(loads: Loads, setting: Setting, *, workers: int) -> WayTable:
    """The ways of all stages of `loads` on all sizes."""
    ways, store = ways_of(setting), setting.sum_store
    up, down = link(loads, store, workers)
    columns = np.broadcast_arrays(loads.summed_bytes, up, down, *tied_times(loads, setting, up, down))
    alike, place, row = _distinct([column.ravel() for column in columns])
    stage, group = place // columns[0].shape[1], np.zeros(len(place), dtype=np.int64)
    fits = _fits(loads.summed_bytes, setting, ways)
    if store.costs_by_byte or not fits.all():
        group[1:] = (alike[0, 1:] != alike[0, :-1]).cumsum()  # the bytes that are summed decide
    stage = stage[np.searchsorted(group, np.arange(group.max(initial=-1) + 1))]
    usd = np.concatenate([np.broadcast_to(way_usd(way, loads, setting), (len(fits), 1)) for way in ways], axis=1)
    usd = np.where(fits, usd, np.inf)[stage]
    return _in_order(ways, usd, _seconds(alike, setting, ways), group, row.reshape(columns[0].shape))


def _distinct(columns: Sequence[Array]) -> tuple[Array, IntArray, IntArray]:
    """The distinct elements of parallel arrays in ascending order, the place of one of each, and which one each is."""
    order = np.lexsort(columns[::-1])
    ordered = np.stack(columns)[:, order]
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
    which = np.empty_like(order)
    which[order] = is_new.cumsum() - 1
    return ordered[:, is_new], order[is_new], which


def _in_order(ways: tuple[SyncWay, ...], usd: Array, seconds: Array, group: IntArray, row: IntArray) -> WayTable:
    """The table: for each group the ways in the order of their dollars, without those that are no faster than others.

    Ways with infinite dollars cannot be. A group with fewer ways than others repeats its last one.
    """
    order = np.argsort(usd, axis=1, kind="stable")
    usd = np.take_along_axis(usd, order, axis=1)
    seconds = np.take_along_axis(seconds, order[group], axis=1)
    seconds[np.isinf(usd)[group]] = np.inf
    np.minimum.accumulate(seconds, axis=1, out=seconds)
    faster = np.ones(usd.shape, dtype=bool)
    starts = np.searchsorted(group, np.arange(len(usd)))
    faster[:, 1:] = np.logical_or.reduceat(seconds[:, 1:] < seconds[:, :-1], starts, axis=0)
    count = faster.sum(axis=1, keepdims=True)
    place = np.argsort(~faster, axis=1, kind="stable")[:, : count.max(initial=1)]
    place = np.take_along_axis(place, np.minimum(np.arange(place.shape[1]), count - 1), axis=1)
    return WayTable(
        ways=ways,
        number=np.take_along_axis(order, place, axis=1),
        usd=np.take_along_axis(usd, place, axis=1),
        seconds=np.take_along_axis(seconds, place[group], axis=1),
        group=group,
        row=row,
    )


def _seconds(columns: Array, setting: Setting, ways: Sequence[SyncWay]) -> Array:
    """Seconds of each way (column) for each row: summed bytes, up, down, and the seconds of `tied_times`."""
    summed, up, down, tied_s, backward_s = columns[:, :, None]
    size, merged = setting.sync_wire_ratio * summed, setting.merged_wire_ratio * summed
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
    seconds += tied_s
    return seconds
