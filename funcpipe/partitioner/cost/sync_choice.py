"""The ways of synchronising worth comparing, and the best of them for one gradient on one kind of function."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from funcpipe.core import PlatformSpec, StoreSpec, Streams, Sync
from funcpipe.core.choices import members_of_group
from funcpipe.partitioner.cost.pipeline import dollars
from funcpipe.partitioner.cost.stores import pace_of, request_usd, requests_each
from funcpipe.partitioner.cost.sync_time import sync_time_s

_ROUNDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
_GROUPS = (1, 2, 3, 4, 5, 7, 8, 15)
_MERGED = (1, 2, 3, 4, 6)
_TREE_ROUNDS, _FAN_INS = (1, 2, 4, 8), (2, 3, 4, 6, 8, 11)
_MOST_MERGED = 8  # gets of more leave no room for those of pieces: such ways are never the best


_LEAST_REPLICAS = 16
"""Of fewer replicas, a hierarchy has four puts of each, and eight latencies, for at most 12 gets fewer; and a tree as
many latencies.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncChoice:
    """A way to synchronise, its seconds, and its dollars for the functions' time and the requests."""

    sync: Sync
    streams: Streams | None
    time_s: float
    cost_usd: float


def candidates(replicas: int, *, sharded: bool = False) -> Iterator[tuple[Sync, Streams]]:
    """The ways in rounds or groups worth comparing; with a `sharded` optimiser those where each replica sums a part."""
    if not sharded:
        for rounds in (*_ROUNDS, 32, 48):
            yield Sync.EXCHANGE, Streams(rounds, 1, 1)
        if replicas < 3:
            return
    for rounds in _ROUNDS:
        for groups in sorted({*(g for g in _GROUPS if g < replicas), replicas - 1}):
            for merged in sorted({m for m in (*_MERGED, rounds) if rounds % m == 0 and m <= _MOST_MERGED}):
                yield Sync.STREAMED, Streams(rounds, groups, merged)
    if replicas >= _LEAST_REPLICAS:
        yield from _grouped(replicas, sharded=sharded)


def _grouped(replicas: int, *, sharded: bool) -> Iterator[tuple[Sync, Streams]]:
    members = members_of_group(replicas)
    if members < replicas:
        for groups in sorted({*(g for g in _GROUPS if g < members), members - 1}):
            yield Sync.HIERARCHICAL, Streams(1, groups, 1)
    for rounds, fan_in in itertools.product(_TREE_ROUNDS, () if sharded else _FAN_INS):
        yield Sync.TREE, Streams(rounds, fan_in, rounds)


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
                poll_s=spec.poll_s,
                streams=streams,
                pace=pace_of(spec, replicas, replicas),
            )
        )
        requests_usd = request_usd(*requests_each(sync, replicas, streams), spec)
        cost_usd = replicas * dollars(price_usd_s, time_s, requests_usd)
        return SyncChoice(sync=sync, streams=streams, time_s=time_s, cost_usd=cost_usd)

    choices = [priced(sync, streams) for sync, streams in candidates(replicas, sharded=sharded)]
    return min(choices, key=lambda choice: (choice.cost_usd + time_value / 3600 * choice.time_s, choice.time_s))
