"""All ways of synchronising that a stage may choose from, and how long each takes for each of many stages.

More requests buy fewer seconds: of ways that take as many requests, only the fastest counts, and a way counts only if
it is faster than all that take fewer. So the seconds of a row of `WayTable` fall from left to right, and its dollars
rise. By hand, for four replicas: all-reduce takes 4 puts and 6 gets, an exchange in one round 4 and 12. If all-reduce
takes 9 s and the exchange 7 s, both count; if the exchange takes 10 s, its column says 9 s and it is never chosen.

Where a store costs by the byte, an exchange of the same number of requests costs more for a larger gradient, and where
it takes no large objects, some ways are only for small ones: then each stage has an order of its own. Ways are counted
by their dollars, here as everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from funcpipe.core import Sync, SyncWay, usual_streams
from funcpipe.partitioner.cost import Array, BoolArray, IntArray
from funcpipe.partitioner.cost.loads import Loads, Setting
from funcpipe.partitioner.cost.stores import Pace, link, pace_of, ways_fit, ways_usd
from funcpipe.partitioner.cost.sync_choice import candidates
from funcpipe.partitioner.cost.sync_time import exposed_s, sync_time_s
from funcpipe.partitioner.cost.waits import Cut

_ELEMENTS = 3000
"""How many elements are computed at a time: few enough for the processor's cache."""


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
    """How long stages (rows) take to synchronise in the fastest of the ways up to a column, cheapest ways first.

    `row[stage, size]` is the row of a stage on a size; stages that take as long in every way share one. Seconds include
    those for the gradients of tied parameters, as `formulas.sync_times`.

    Stages with equally large gradients form a group: row r has the dollars `usd[group[r]]`, which rise along the
    columns, and the ways `number[group[r]]`, places in `ways`. So a stage has the same columns on all sizes.
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
        usd: Array = self.usd[self.group[row], column]
        return usd

    def usd_rows(self, row: IntArray) -> Array:
        """Dollars of these rows in all columns."""
        usd: Array = self.usd[self.group[row]]
        return usd


def any_way_fits(loads: Loads, setting: Setting) -> BoolArray:
    """Which stages have a way of synchronising whose objects fit the store."""
    return np.asarray(ways_fit(ways_of(setting), loads, setting).any(axis=-1))


class Crossing(NamedTuple):
    """Seconds in which gradients that are summed on the host leave accelerators, and sums come back: of tied parameters
    in each step, and of all others in each sum of all replicas.
    """

    tied_s: Array
    summed_s: Array


def sum_crossing(loads: Loads, setting: Setting) -> Crossing:
    """The crossing of sums of each stage: each gradient leaves once, and each sum returns once; the share that a
    replica updates crosses once more each way.
    """
    summed = setting.exchanged_bytes(loads.summed_bytes) if setting.replicas > 1 else np.zeros_like(loads.summed_bytes)
    tied = loads.ties.upload_bytes + loads.ties.download_bytes
    times = 2 + 2 / setting.shares if setting.shares > 1 else 2
    return Crossing(tied / loads.host_device_bytes_s, times * summed / loads.host_device_bytes_s)


def tied_times(loads: Loads, setting: Setting, up: Array, down: Array) -> tuple[Array, Array]:
    """Seconds in which each stage writes and reads the gradients of tied parameters, and those of the backward during
    which other gradients may travel: none where stages share parameters or return gradients of activations, as nothing
    travels before it has ended, and none where what travels is made by the optimiser. The former include those in which
    gradients and sums cross between accelerators and hosts.
    """
    ties, store = loads.ties, setting.sum_store
    tied_s = ties.upload_bytes / up + ties.download_bytes / down
    tied_s = tied_s + store.latency_s * (ties.upload_objects + ties.download_objects)
    tied_s = tied_s + store.poll_s / 2 * ties.download_objects
    met_s = ties.lent_bytes / up + ties.borrowed_bytes / down + store.latency_s * ties.upload_objects
    crossing = sum_crossing(loads, setting)
    tied_s = tied_s + setting.lone_share * met_s + crossing.tied_s + setting.meeting_share * crossing.summed_s
    waits = (ties.download_objects > 0) | (loads.traffic.backward_out_objects > 0) | setting.alone
    backward_s = np.where(waits, 0.0, setting.spec.contention * loads.backward_s)
    return tied_s, backward_s


HALF_HIDDEN = 2.2
"""By how much a late exchange takes longer than the stage computes in a step, where half of it is hidden."""


def hiding_times(loads: Loads, setting: Setting) -> Array:
    """Seconds of an exchange that a step of each stage hides by half, see `exposed_late_s`."""
    forwards = np.where(loads.recompute, 2.0, 1.0)
    computed_s = setting.spec.contention * (forwards * loads.forward_s + loads.backward_s)
    hiding: Array = HALF_HIDDEN * setting.micro_batches_each * computed_s
    return hiding


def exposed_late_s(seconds: Array, hiding_s: Array, parts: Array | int) -> Array:
    """Seconds by which steps take longer beside which an exchange of so many `seconds` goes on, in as many `parts`.

    Its objects keep messages between stages waiting, and the last ones come after the last backward; the longer it
    takes, the more. As one part, x seconds prolong the step by x · x / (x + `hiding_s`): hardly by anything if it is
    short. n parts, each of which begins and ends in a step of its own, hide as much as a step √n times as long. That is
    an estimate, made from plans that were played (`tests/analysis/test_predict.py`).
    """
    each_s = seconds / np.sqrt(parts)
    exposed: Array = seconds * each_s / np.maximum(each_s + hiding_s, 1e-12)
    return exposed


def late_parts(way: SyncWay, setting: Setting) -> int:
    """The number of steps over which a late exchange is spread, at most its delay (`scheduler.late`)."""
    rounds = usual_streams(way.sync, setting.replicas, way.streams).rounds
    return min(setting.delay, rounds + (way.sync is not Sync.EXCHANGE))


def sync_times(loads: Loads, setting: Setting, *, workers: int, way: SyncWay | None = None) -> Array:
    """Seconds in which each stage's replicas sum their gradients, from its last backward on, in `way`.

    They include those in which it writes and reads the gradients of tied parameters, one after the other. `workers`
    functions share the store of sums. None stands for the way of the setting. Of replicas that train alone, a step's
    share of a meeting counts.
    """
    up, down = link(loads, setting.sum_store, workers)
    tied_s, backward_s = tied_times(loads, setting, up, down)
    way = setting.way if way is None else way
    exchanged = setting.exchanged_bytes(loads.summed_bytes)
    rounding = setting.rounding(loads.vcpu)
    seconds = sync_time_s(
        way.sync,
        gradient_bytes=setting.sync_wire_ratio * exchanged,
        merged_bytes=setting.merged_wire_ratio * exchanged,
        replicas=setting.replicas,
        upload_bytes_s=up,
        download_bytes_s=down,
        latency_s=setting.sum_store.latency_s,
        poll_s=setting.sum_store.poll_s,
        streams=way.streams,
        backward_s=backward_s,
        rounding=rounding,
        pace=pace_of(setting.sum_store, setting.replicas, workers),
    )
    if setting.delay:
        seconds = exposed_late_s(seconds, hiding_times(loads, setting), late_parts(way, setting))
    return tied_s + setting.meeting_share * seconds


def way_table(loads: Loads, setting: Setting, *, workers: int) -> WayTable:
    """The ways of all stages of `loads` on all sizes."""
    ways = ways_of(setting)
    up, down = link(loads, setting.sum_store, workers)
    exchanged = setting.exchanged_bytes(loads.summed_bytes)
    late = (hiding_times(loads, setting),) if setting.delay else ()
    vcpu = () if setting.codec is None else (loads.vcpu,)
    columns = np.broadcast_arrays(exchanged, up, down, *tied_times(loads, setting, up, down), *late, *vcpu)
    stages, sizes = columns[0].shape
    rows, example, row = np.unique(
        np.stack([column.ravel() for column in columns]), axis=1, return_index=True, return_inverse=True
    )
    starts = np.flatnonzero(np.diff(rows[0], prepend=-1.0))  # rows are sorted by the bytes that are summed
    usd = np.where(ways_fit(ways, loads, setting), ways_usd(ways, loads, setting), np.inf)[:, 0]
    usd = usd[example[starts] // sizes]
    if len(usd) and (usd == usd[0]).all():  # then no row needs to be put into an order of its own
        order = np.argsort(usd[0], kind="stable")
        ways, usd = tuple(ways[place] for place in order), usd[:, order]
    pace = pace_of(setting.sum_store, setting.replicas, workers)
    return _in_order(ways, usd, _seconds(rows, setting, ways, pace), starts, row.reshape(stages, sizes))


def _in_order(ways: tuple[SyncWay, ...], usd: Array, seconds: Array, starts: IntArray, row: IntArray) -> WayTable:
    """The table: for each group the ways in the order of their dollars, without those that are no faster than others.

    `starts` are the first rows of the groups. Ways with infinite dollars cannot be. A group with fewer ways than others
    repeats its last one.
    """
    group = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(seconds)))
    order = np.broadcast_to(np.arange(usd.shape[1]), usd.shape)
    if (usd[:, 1:] < usd[:, :-1]).any():
        order = np.argsort(usd, axis=1, kind="stable")
        usd = np.take_along_axis(usd, order, axis=1)
        seconds = np.take_along_axis(seconds, order[group], axis=1)
    if np.isinf(usd).any():
        seconds[np.isinf(usd)[group]] = np.inf
    np.minimum.accumulate(seconds, axis=1, out=seconds)
    faster = np.ones(usd.shape, dtype=bool)
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


def _seconds(rows: Array, setting: Setting, ways: Sequence[SyncWay], pace: Pace) -> Array:
    """Element [row, way]: seconds; `rows` has the bytes that are summed, up, down, and the two seconds of `tied_times`,
    where exchanges are late those of `hiding_times`, and where sums are rounded the vCPUs: one of each for each row.
    """
    summed, up, down, tied_s, backward_s, *vcpu = rows[:, :, None]
    hiding_s = vcpu.pop(0) if setting.delay else None
    size, merged = setting.sync_wire_ratio * summed, setting.merged_wire_ratio * summed
    seconds = np.empty((len(size), len(ways)))
    latency_s, poll_s, replicas = setting.sum_store.latency_s, setting.sum_store.poll_s, setting.replicas
    if replicas == 1:
        seconds[:] = tied_s
        return seconds
    for sync in {way.sync for way in ways}:
        which = [i for i, way in enumerate(ways) if way.sync is sync]
        if sync in (Sync.EXCHANGE, Sync.STREAMED):  # whose forms take many cuts at once
            chosen = [usual_streams(sync, replicas, ways[i].streams) for i in which]
            cut = Cut(
                *(np.array(counts) for counts in zip(*((s.rounds, s.groups, s.merged) for s in chosen), strict=True))
            )
            rows_at_once = max(1, _ELEMENTS // len(which))
            for low in range(0, len(size), rows_at_once):
                some = slice(low, low + rows_at_once)
                links = (size[some], replicas, up[some], down[some], latency_s)
                rounding = setting.rounding(vcpu[0][some]) if vcpu else None
                seconds[some, which] = exposed_s(
                    sync,
                    *links,
                    cut,
                    backward_s[some],
                    merged_bytes=merged[some],
                    rounding=rounding,
                    pace=pace,
                    poll_s=poll_s,
                )
            continue
        for i in which:
            found = sync_time_s(
                sync,
                gradient_bytes=size,
                merged_bytes=merged,
                replicas=replicas,
                upload_bytes_s=up,
                download_bytes_s=down,
                latency_s=latency_s,
                poll_s=poll_s,
                streams=ways[i].streams,
                backward_s=backward_s,
                rounding=setting.rounding(vcpu[0]) if vcpu else None,
                pace=pace,
            )
            seconds[:, [i]] = found
    if hiding_s is not None:
        seconds = exposed_late_s(seconds, hiding_s, np.array([late_parts(way, setting) for way in ways]))
    seconds *= setting.meeting_share
    seconds += tied_s
    return seconds
