"""Which way of synchronising is best for one gradient on one kind of function."""

from collections.abc import Iterator
from dataclasses import dataclass

from funcpipe.core import PlatformSpec, StoreSpec, Streams, Sync
from funcpipe.partitioner.cost.pipeline import dollars
from funcpipe.partitioner.cost.requests import request_usd, requests_each
from funcpipe.partitioner.cost.sync_time import sync_time_s

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
