"""How long replicas need to sum their gradients through storage: a closed form for each way of doing it.

n replicas sum s bytes each; up and down are the bytes per second of their links. Every request has a latency before its
body moves, an object can be read once its put has ended, enough requests are open at once, and in each direction one
body moves at a time. No algorithm is faster than two latencies and max(s / up, 2 s (n-1) / (n down)): every element
must go up at least once from each replica, and come down as n-1 others' values or sums of them.

By hand: four replicas with 120 bytes each, 10 bytes/s up, 30 bytes/s down, no latency. A split of 30 bytes takes 3 s up
and 1 s down. Three-phase: three splits up (9 s), three down (3 s), the sum up (3 s), three sums down (3 s): 18 s.

>>> link = {"gradient_bytes": 120, "replicas": 4, "upload_bytes_s": 10, "download_bytes_s": 30, "latency_s": 0}
>>> float(sync_time_s(Sync.THREE_PHASE, **link))
18.0

The tests compare every form with a simulation of the single transfers. `choose` finds the best way for one gradient on
one kind of function; the ways of all stages at once are in `sync_ways`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from funcpipe.core import PlatformSpec, StoreSpec, Streams, Sync, usual_streams
from funcpipe.partitioner.cost import Array, IntArray
from funcpipe.partitioner.cost.pipeline import dollars
from funcpipe.partitioner.cost.stores import request_usd, requests_each


def sync_time_s(
    sync: Sync,
    *,
    gradient_bytes: Array | float,
    replicas: int,
    upload_bytes_s: Array | float,
    download_bytes_s: Array | float,
    latency_s: float,
    streams: Streams | None = None,
    backward_s: Array | float = 0.0,
    merged_bytes: Array | float | None = None,
) -> Array:
    """Seconds in which `replicas` functions sum `gradient_bytes` each, counted from the end of their last backward.

    Bytes are those that travel. Where the sums, or what is sent in their place, are as many values in another format,
    they take `merged_bytes`. Exchange and streamed begin during that backward, which takes `backward_s`.

    Three-phase (LambdaML): the splits of others up, one's own split from each of them down, the merged split up and
    those of the others down, one after the other. Pipelined (FuncPipe): the first two overlap, step by step. For equal
    links w the two take 3s/w − 2s/(nw) + 4 latencies and 2s/w + (2 + n) latencies (FuncPipe, section 3.3).
    """
    split_bytes = np.asarray(gradient_bytes, dtype=np.float64) / replicas
    up_s, down_s = split_bytes / upload_bytes_s, split_bytes / download_bytes_s
    if replicas == 1:
        return np.zeros_like(up_s)
    merged_bytes = np.asarray(gradient_bytes if merged_bytes is None else merged_bytes, dtype=np.float64)
    spread_s: Array = merged_bytes / replicas * (1 / upload_bytes_s + (replicas - 1) / download_bytes_s)
    link = (gradient_bytes, replicas, upload_bytes_s, download_bytes_s, latency_s)
    match sync:
        case Sync.THREE_PHASE:
            return (replicas - 1) * (up_s + down_s) + spread_s + 4 * latency_s
        case Sync.ALL_REDUCE:
            return all_reduce_s(*link)
        case Sync.EXCHANGE | Sync.STREAMED:
            cut = usual_streams(sync, replicas, streams)
            return exposed_s(sync, *link, cut, backward_s, merged_bytes=merged_bytes)
    reduce_s: Array = up_s + (replicas - 2) * np.maximum(up_s, down_s) + down_s
    return reduce_s + spread_s + (2 + replicas) * latency_s


def limit_s(
    gradient_bytes: Array | float, replicas: int, up: Array | float, down: Array | float, latency_s: float
) -> Array:
    """Seconds below which no algorithm sums the gradients."""
    size = np.asarray(gradient_bytes, dtype=np.float64)
    moved_s: Array = np.maximum(size / up, 2 * size * (replicas - 1) / (replicas * down))
    return moved_s + 2 * latency_s


class Cut(NamedTuple):
    """How a gradient is divided in each of many ways: the counts of `Streams`, along the last axis."""

    rounds: IntArray | int
    groups: IntArray | int
    merged: IntArray | int


def streamed_s(
    gradient_bytes: Array | float,
    replicas: int,
    up: Array | float,
    down: Array | float,
    latency_s: float,
    cut: Streams | Cut,
    *,
    merged_bytes: Array | float | None = None,
) -> Array:
    """Seconds of the streamed scatter-reduce, in which raw objects go before merged ones.

    Exact where the downlink is no faster than the uplink. Then merged object j waits for its share of the raw pieces
    and for the objects before it; all read it after all raw pieces and the merged objects before it. So the last one
    is read when, for some objects i <= j, object i has been reduced, i to j have gone up, and j and those behind it
    have come down. That is a convex function of i and j, whose largest value lies at (1, 1), (1, last) or (last, last).
    """
    n, merged = replicas, np.minimum(cut.merged, cut.rounds)
    size = np.asarray(gradient_bytes, dtype=np.float64)
    foreign = (n - 1) * size / n
    first = -(-(n - 1) // np.minimum(cut.groups, n - 1)) * size / (n * cut.rounds)
    own = (size if merged_bytes is None else np.asarray(merged_bytes, dtype=np.float64)) / (n * merged)
    put_s, read_s, all_up_s = own / up, (n - 1) * own / down, foreign / up

    def begins_s(share: Array | float) -> Array:
        reduced_s = np.maximum(first / up + share * foreign / down, share * all_up_s + first / down)
        begun_s: Array = np.maximum(reduced_s + 2 * latency_s, all_up_s)
        return begun_s + latency_s

    raw_s = 2 * latency_s + np.maximum(first / up + foreign / down, all_up_s + first / down)
    early_s = begins_s(1 / merged) + np.maximum(put_s + merged * read_s, merged * put_s + read_s)
    late_s = begins_s(1.0) + put_s + read_s
    ends_s: Array = np.maximum(raw_s + merged * read_s, np.maximum(early_s, late_s) + latency_s)
    return ends_s


def exchange_s(
    gradient_bytes: Array | float,
    replicas: int,
    up: Array | float,
    down: Array | float,
    latency_s: float,
    cut: Streams | Cut,
) -> Array:
    """Seconds in which every replica writes everything, in rounds, and reads everything from the others."""
    size = np.asarray(gradient_bytes, dtype=np.float64)
    others, chunk = (replicas - 1) * size, size / cut.rounds
    moved_s: Array = np.maximum(chunk / up + others / down, size / up + (replicas - 1) * chunk / down)
    return moved_s + 2 * latency_s


def exposed_s(
    sync: Sync,
    gradient_bytes: Array | float,
    replicas: int,
    up: Array | float,
    down: Array | float,
    latency_s: float,
    cut: Streams | Cut,
    backward_s: Array | float,
    *,
    merged_bytes: Array | float | None = None,
) -> Array:
    """Seconds that an exchange or a streamed scatter-reduce takes beyond the backward during which it begins.

    The backward completes its rounds one by one, evenly over its `backward_s`, or at its end where that is 0. All of
    these but the last round's share is gained; what is left is at least the time of the last round alone.
    """
    link = (replicas, up, down, latency_s)
    sums = np.asarray(gradient_bytes if merged_bytes is None else merged_bytes, dtype=np.float64)

    def form(cut: Streams | Cut, share: Array | float) -> Array:
        size = share * np.asarray(gradient_bytes, dtype=np.float64)
        if sync is Sync.EXCHANGE:
            return exchange_s(size, *link, cut)
        return streamed_s(size, *link, cut, merged_bytes=share * sums)

    share = 1 / np.asarray(cut.rounds)
    whole_s = form(cut, 1.0) - (1 - share) * np.asarray(backward_s)
    exposed: Array = np.maximum(whole_s, form(Cut(1, cut.groups, 1), share))
    return exposed


def all_reduce_s(
    gradient_bytes: Array | float, replicas: int, up: Array | float, down: Array | float, latency_s: float
) -> Array:
    """Seconds in which one replica adds up what all others write (LambdaML, Jiang et al., SIGMOD 2021)."""
    size = np.asarray(gradient_bytes, dtype=np.float64)
    moved_s: Array = 2 * size / up + replicas * size / down
    return moved_s + 4 * latency_s


def parameter_server_s(
    gradient_bytes: float, replicas: int, up: float, down: float, latency_s: float, server_bytes_s: float
) -> float:
    """Seconds in which all replicas push gradients to a server and pull parameters from it.

    The server moves `server_bytes_s` each way, for all of them together, and no storage lies between: one latency each
    way (HybridPS in LambdaML; Cirrus, SoCC 2019).
    """
    all_bytes = replicas * gradient_bytes
    push_s = max(gradient_bytes / up, all_bytes / server_bytes_s)
    return push_s + max(gradient_bytes / down, all_bytes / server_bytes_s) + 2 * latency_s


_ROUNDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
_GROUPS = (1, 2, 3, 4, 5, 7, 8, 15)
_MERGED = (1, 2, 3, 4, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncChoice:
    """A way to synchronise, its seconds, and its dollars for the functions' time and the requests."""

    sync: Sync
    streams: Streams | None
    time_s: float
    cost_usd: float


def candidates(replicas: int, *, sharded: bool = False) -> Iterator[tuple[Sync, Streams]]:
    """The exchanges and streams worth comparing; with a `sharded` optimiser there are no exchanges."""
    if not sharded:
        for rounds in (*_ROUNDS, 32, 48):
            yield Sync.EXCHANGE, Streams(rounds, 1, 1)
        if replicas < 3:
            return
    for rounds in _ROUNDS:
        for groups in sorted({*(g for g in _GROUPS if g < replicas), replicas - 1}):
            for merged in sorted({*(m for m in _MERGED if rounds % m == 0), rounds}):
                yield Sync.STREAMED, Streams(rounds, groups, merged)


def choose(
    gradient_bytes: float,
    replicas: int,
    *,
    up: float,
    down: float,
    price_usd_s: float,
    spec: PlatformSpec | StoreSpec,
    time_value: float = 0.0,
    sharded: bool = False,
    merged_bytes: float | None = None,
) -> SyncChoice:
    """The cheapest way on functions of `price_usd_s`, where a saved hour is worth `time_value` dollars.

    Bytes are those that travel, as in `sync_time_s`.
    """

    def priced(sync: Sync, streams: Streams) -> SyncChoice:
        time_s = float(
            sync_time_s(
                sync,
                gradient_bytes=gradient_bytes,
                merged_bytes=merged_bytes,
                replicas=replicas,
                upload_bytes_s=up,
                download_bytes_s=down,
                latency_s=spec.latency_s,
                streams=streams,
            )
        )
        requests_usd = request_usd(*requests_each(sync, replicas, streams), spec)
        cost_usd = replicas * dollars(price_usd_s, time_s, requests_usd)
        return SyncChoice(sync=sync, streams=streams, time_s=time_s, cost_usd=cost_usd)

    choices = [priced(sync, streams) for sync, streams in candidates(replicas, sharded=sharded)]
    return min(choices, key=lambda choice: (choice.cost_usd + time_value / 3600 * choice.time_s, choice.time_s))
