"""Closed forms of streamed synchronisation through storage, and the choice among all ways by what they take and cost.

n replicas sum s bytes each; up and down are their bytes per second, every request has a latency before its body moves,
an object can be read when its put ends, enough requests are open at once, and in each direction one body moves at a
time. No algorithm is faster than two latencies and max(s / up, 2 s (n-1) / (n down)): every element must go up at least
once from each replica, and come down as n-1 others' values or sums of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from funcpipe.core import PlatformSpec, Streams, Sync

Array = npt.NDArray[np.float64]

_ROUNDS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
_GROUPS = (1, 2, 3, 4, 5, 7, 8, 15)
_MERGED = (1, 2, 3, 4, 6)


def limit_s(
    gradient_bytes: Array | float, replicas: int, up: Array | float, down: Array | float, latency_s: float
) -> Array:
    """Seconds below which no algorithm sums the gradients."""
    size = np.asarray(gradient_bytes, dtype=np.float64)
    moved_s: Array = np.maximum(size / up, 2 * size * (replicas - 1) / (replicas * down))
    return moved_s + 2 * latency_s


def streamed_s(
    gradient_bytes: Array | float,
    replicas: int,
    up: Array | float,
    down: Array | float,
    latency_s: float,
    streams: Streams,
) -> Array:
    """Seconds of the streamed scatter-reduce whose raw objects go before the merged ones.

    Exact where the downlink is not the faster one. Then each merged object j waits for its share of the raw pieces and
    for the objects before it, and is got by everybody after all raw pieces and the merged ones before it.
    """
    n, merged = replicas, min(streams.merged, streams.rounds)
    size = np.asarray(gradient_bytes, dtype=np.float64)
    foreign = (n - 1) * size / n
    first = -(-(n - 1) // min(streams.groups, n - 1)) * size / (n * streams.rounds)
    own = size / (n * merged)
    ends = 2 * latency_s + np.maximum(first / up + foreign / down, foreign / up + first / down)
    put = np.zeros_like(size)
    for j in range(1, merged + 1):
        share = j / merged * foreign
        reduced = 2 * latency_s + np.maximum(first / up + share / down, share / up + first / down)
        put = np.maximum(np.maximum(reduced + latency_s, put), latency_s + foreign / up) + own / up
        ends = np.maximum(ends, put + latency_s) + (n - 1) * own / down
    return np.asarray(ends, dtype=np.float64)


def exchange_s(
    gradient_bytes: Array | float,
    replicas: int,
    up: Array | float,
    down: Array | float,
    latency_s: float,
    streams: Streams,
) -> Array:
    """Seconds in which everybody puts everything, in rounds, and gets all of the others'."""
    size = np.asarray(gradient_bytes, dtype=np.float64)
    others, chunk = (replicas - 1) * size, size / streams.rounds
    moved_s: Array = np.maximum(chunk / up + others / down, size / up + (replicas - 1) * chunk / down)
    return moved_s + 2 * latency_s


def exposed_s(
    sync: Sync,
    gradient_bytes: Array | float,
    replicas: int,
    up: Array | float,
    down: Array | float,
    latency_s: float,
    streams: Streams,
    backward_s: Array | float,
) -> Array:
    """Seconds that an exchange or a streamed scatter-reduce goes on after the backward during which it began.

    Its rounds are complete one by one, evenly over the `backward_s`: all but the last one's share of these is gained,
    and what is left is at least what the last round takes by itself.
    """
    form = exchange_s if sync is Sync.EXCHANGE else streamed_s
    link = (replicas, up, down, latency_s)
    whole_s = form(gradient_bytes, *link, streams) - (1 - 1 / streams.rounds) * np.asarray(backward_s)
    last_round = Streams(1, streams.groups, 1)
    return np.maximum(whole_s, form(np.asarray(gradient_bytes) / streams.rounds, *link, last_round))


def all_reduce_s(
    gradient_bytes: Array | float, replicas: int, up: Array | float, down: Array | float, latency_s: float
) -> Array:
    """Seconds in which one replica adds up what all others put (LambdaML, Jiang et al., SIGMOD 2021)."""
    size = np.asarray(gradient_bytes, dtype=np.float64)
    moved_s: Array = 2 * size / up + replicas * size / down
    return moved_s + 4 * latency_s


def parameter_server_s(
    gradient_bytes: float, replicas: int, up: float, down: float, latency_s: float, server_bytes_s: float
) -> float:
    """Seconds in which all push to a server and pull from it, which moves so many bytes per second each way.

    A request and its answer each way; no storage lies between (HybridPS in LambdaML; Cirrus, SoCC 2019).
    """
    all_bytes = replicas * gradient_bytes
    push_s = max(gradient_bytes / up, all_bytes / server_bytes_s)
    return push_s + max(gradient_bytes / down, all_bytes / server_bytes_s) + 2 * latency_s


def raw_objects(replicas: int, streams: Streams) -> int:
    """Raw objects of a replica in each round: as many groups as there are, none of them empty."""
    readers = -(-(replicas - 1) // min(streams.groups, replicas - 1))
    return -(-(replicas - 1) // readers)


def requests_each(sync: Sync, replicas: int, streams: Streams) -> tuple[float, float]:
    """Puts and gets of each replica in one synchronisation, on average."""
    n, merged = replicas, min(streams.merged, streams.rounds)
    match sync:
        case _ if n == 1:
            return 0, 0
        case Sync.THREE_PHASE | Sync.PIPELINED:
            return n, 2 * (n - 1)
        case Sync.ALL_REDUCE:
            return 1, 2 * (n - 1) / n
        case Sync.EXCHANGE:
            return streams.rounds, (n - 1) * streams.rounds
        case Sync.STREAMED:
            return streams.rounds * raw_objects(n, streams) + merged, (n - 1) * (streams.rounds + merged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
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
    spec: PlatformSpec,
    time_value: float = 0.0,
    sharded: bool = False,
) -> Choice:
    """The way that costs least, for functions of `price_usd_s`, where a saved hour is worth `time_value` dollars."""

    def priced(sync: Sync, streams: Streams) -> Choice:
        form = exchange_s if sync is Sync.EXCHANGE else streamed_s
        time_s = float(form(gradient_bytes, replicas, up, down, spec.latency_s, streams))
        puts, gets = requests_each(sync, replicas, streams)
        request_usd = puts * spec.price_put_usd + gets * spec.price_get_usd
        cost_usd = replicas * (time_s * price_usd_s + request_usd)
        return Choice(sync=sync, streams=streams, time_s=time_s, cost_usd=cost_usd)

    choices = [priced(sync, streams) for sync, streams in candidates(replicas, sharded=sharded)]
    return min(choices, key=lambda choice: (choice.cost_usd + time_value / 3600 * choice.time_s, choice.time_s))
