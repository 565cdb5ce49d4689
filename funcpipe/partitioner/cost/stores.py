"""The traffic of stages through the stores of messages and of sums: bytes, requests, and what they cost.

Activations and their gradients are messages, and so are outputs that replicas exchange for a joint loss. What replicas
exchange to sum gradients, and the gradients of tied parameters, which travel at the same time, are sums. By hand: four
replicas of a stage sum 120 bytes each by streams. Each sends three quarters of its own gradient, 90 bytes, and its
quarter of the sums, 30; and receives three other replicas' share of its quarter, 90 bytes, and the three other quarters
of the sums, 90.

>>> sync_bytes_each(Sync.STREAMED, 4, 120.0, 120.0)
(120.0, 180.0)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from funcpipe.core import PlatformSpec, StoreEstimate, StoreSpec, Streams, Sync, SyncWay, usual_streams
from funcpipe.core.choices import members_of_group
from funcpipe.core.stores import StoreTerms
from funcpipe.core.texts import STAGE_PREFIXES
from funcpipe.partitioner.cost import Array, BoolArray, IntArray
from funcpipe.partitioner.cost.loads import Loads, Setting, StageTraffic
from funcpipe.scheduler.simulator.request_queues import BURST_S


def joint_requests(loads: Loads, setting: Setting) -> tuple[Array, Array]:
    """Puts and gets of outputs by each stage in one iteration, all replicas together."""
    exchanging = loads.is_last * float(setting.joint_bytes is not None and setting.replicas > 1)
    return setting.replicas * exchanging, setting.replicas * (setting.replicas - 1) * exchanging


def joint_bytes_each(setting: Setting) -> tuple[float, float]:
    """Bytes that each replica of the last stage sends to the others, and receives from them."""
    if setting.joint_bytes is None or setting.replicas == 1:
        return 0.0, 0.0
    own_bytes = float(setting.micro_batches_each * setting.joint_bytes)
    return own_bytes, (setting.replicas - 1) * own_bytes


def requests(loads: Loads, setting: Setting, ways: Sequence[SyncWay] | None = None) -> tuple[Array, Array]:
    """Puts and gets of each stage in one iteration, or in the mean of all; all replicas together.

    `ways` are those of the stages, along the last axis; None stands for the way of the setting, and none at all leaves
    synchronisation out.
    """
    puts, gets = message_requests(loads.traffic, setting)
    joint_puts, joint_gets = joint_requests(loads, setting)
    if ways is None:
        ways = (setting.way,)
    for_sums = np.array([sync_requests(way, setting.replicas) for way in ways] or [(0, 0)])
    for_sums = setting.meeting_share * for_sums
    tied = _tied_traffic(loads, setting)
    return puts + joint_puts + for_sums[:, 0] + tied.puts, gets + joint_gets + for_sums[:, 1] + tied.gets


def message_requests(traffic: StageTraffic, setting: Setting) -> tuple[Array, Array]:
    """Puts and gets of activations and their gradients."""
    puts = setting.micro_batches * (traffic.forward_out_objects + traffic.backward_out_objects)
    gets = setting.micro_batches * (traffic.forward_in_objects + traffic.backward_in_objects)
    return puts, gets


def sync_requests(way: SyncWay, replicas: int) -> tuple[int, int]:
    """Puts and gets in which the replicas of one stage sum their gradients."""
    puts, gets = requests_each(way.sync, replicas, usual_streams(way.sync, replicas, way.streams))
    return round(replicas * puts), round(replicas * gets)


def request_usd(puts: Any, gets: Any, prices: PlatformSpec | StoreSpec) -> Any:
    """Dollars for storage requests."""
    return prices.request_usd(puts, gets)


def raw_objects(replicas: int, streams: Streams) -> int:
    """How many raw objects a replica writes in each round: one for each group of readers that is not empty."""
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
        case Sync.TREE:
            return streams.rounds, 2 * streams.rounds * (n - 1) / n
        case Sync.HIERARCHICAL:
            members = members_of_group(n)
            others = n // members - 1
            return raw_objects(members, streams) + 1 + 2 * (others > 0), 2 * (members - 1 + others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The traffic of each stage in one iteration, all replicas together, of one kind; an element for each stage."""

    puts: Array
    gets: Array
    sent_bytes: Array
    received_bytes: Array

    def request_usd(self, store: StoreSpec) -> Array:
        """Dollars for its requests."""
        usd: Array = store.request_usd(self.puts, self.gets)  # type: ignore[arg-type, assignment]
        return usd

    def transfer_usd(self, store: StoreSpec) -> Array:
        """Dollars for its bytes."""
        usd: Array = store.transfer_usd(self.sent_bytes, self.received_bytes)  # type: ignore[arg-type, assignment]
        return usd


def link(loads: Loads, store: StoreSpec, workers: int) -> tuple[Array, Array]:
    """Bytes per second up and down that each of `workers` functions gets from `store`, all transferring at once.

    The store's cap, where it has one, holds for each direction and is shared evenly.
    """
    share = np.inf if store.shared_bytes_s is None else store.shared_bytes_s / workers
    most = min(share, np.inf if store.bytes_s is None else store.bytes_s)
    return np.minimum(loads.upload_bytes_s, most), np.minimum(loads.download_bytes_s, most)


class Pace(NamedTuple):
    """The least seconds between two puts, and between two gets, of a function whose store takes so many a second.

    The store lets in some at once after a rest: `free_put_s` and `free_get_s` are the seconds that a function gains by
    that. `one_get_s` are those between two gets of the objects of one replica, by whichever other.
    """

    put_s: float = 0.0
    get_s: float = 0.0
    free_put_s: float = 0.0
    free_get_s: float = 0.0
    one_get_s: float = 0.0

    def puts(self, moved_s: Array, count: IntArray | Array | int) -> Array:
        """Return the seconds of `count` puts, which take `moved_s` one after the other if none has to wait."""
        return _waiting(moved_s, count, self.put_s, self.free_put_s)

    def gets(self, moved_s: Array, count: IntArray | Array | int) -> Array:
        """Return the same of gets."""
        return _waiting(moved_s, count, self.get_s, self.free_get_s)

    def waits_s(self, up_s: Array, puts: int, down_s: Array, gets: int) -> Array:
        """Return how much longer so many puts and gets take than `up_s` and `down_s`, because they wait."""
        longer_s: Array = self.puts(up_s, puts) - up_s + self.gets(down_s, gets) - down_s
        return longer_s


def _waiting(moved_s: Array, count: IntArray | Array | int, each_s: float, free_s: float) -> Array:
    found: Array = np.maximum(moved_s, moved_s / count + count * each_s - free_s)
    return found


UNPACED = Pace()


def pace_of(store: StoreTerms, replicas: int, workers: int) -> Pace:
    """The pace of each replica of a stage, all of which ask at once, in a plan of so many `workers`.

    Objects of a stage lie below up to 16 prefixes that no other stage has (`core.texts.spread_prefix`), whose requests
    a second its replicas share. All workers share those of an account. By hand: 64 replicas put below 16 prefixes that
    take 10 puts a second each. Each may put 160 / 64 = 2.5 objects a second, one in 0.4 s. The first of the four that
    share a prefix begins at once, and a burst of `BURST_S` comes before its time: 0.1 + 0.1 s.

    >>> pace_of(StoreTerms(latency_s=0, price_put_usd=0, price_get_usd=0, puts_s=10), 64, 128)
    Pace(put_s=0.4, get_s=0.0, free_put_s=0.2, free_get_s=0.0, one_get_s=0.0)
    """
    if store.puts_s is None and store.gets_s is None and store.requests_s is None:
        return UNPACED
    sharing = replicas / min(replicas, STAGE_PREFIXES)
    one_s = 0.0 if store.requests_s is None else 1 / store.requests_s
    put_s, get_s = (0.0 if rate is None else 1 / rate for rate in (store.puts_s, store.gets_s))
    free_put_s, free_get_s = (max(each_s, one_s) + BURST_S if each_s or one_s else 0.0 for each_s in (put_s, get_s))
    return Pace(
        put_s=max(sharing * put_s, workers * one_s),
        get_s=max(sharing * get_s, workers * one_s),
        free_put_s=free_put_s,
        free_get_s=free_get_s,
        one_get_s=max(get_s, one_s),
    )


def message_traffic(loads: Loads, setting: Setting) -> Traffic:
    """Activations and their gradients between stages, and outputs between the replicas of the last one."""
    puts, gets = message_requests(loads.traffic, setting)
    each, traffic, back = setting.micro_batches, loads.traffic, setting.back_wire_ratio
    forward = setting.wire_ratio
    joint_puts, joint_gets = joint_requests(loads, setting)
    sent, received = (loads.is_last * setting.replicas * some for some in joint_bytes_each(setting))
    return Traffic(
        puts=puts + joint_puts,
        gets=gets + joint_gets,
        sent_bytes=sent + each * (forward * traffic.forward_out_bytes + back * traffic.backward_out_bytes),
        received_bytes=received + each * (forward * traffic.forward_in_bytes + back * traffic.backward_in_bytes),
    )


def sum_traffic(loads: Loads, setting: Setting, ways: Sequence[SyncWay] | None = None) -> Traffic:
    """The traffic of sums: gradients of replicas, and those of tied parameters on their way between stages.

    Of replicas that train alone, a step's share of a meeting counts. `ways` are those of the stages, as in `requests`.
    """
    chosen = (setting.way,) if ways is None else ways
    counts = setting.meeting_share * np.array([sync_requests(way, setting.replicas) for way in chosen] or [(0, 0)])
    moved = [sync_bytes(way, loads, setting) for way in chosen]
    sent, received = (setting.meeting_share * _along_stages([one[side] for one in moved]) for side in (0, 1))
    tied = _tied_traffic(loads, setting)
    return Traffic(
        puts=counts[:, 0] + tied.puts,
        gets=counts[:, 1] + tied.gets,
        sent_bytes=sent + tied.sent_bytes,
        received_bytes=received + tied.received_bytes,
    )


def _tied_traffic(loads: Loads, setting: Setting) -> Traffic:
    """The traffic of tied parameters."""
    ties, replicas, met = loads.ties, setting.replicas, setting.lone_share
    return Traffic(
        puts=replicas * (ties.upload_objects + met * ties.lent_objects),
        gets=replicas * (ties.download_objects + met * ties.returned_objects),
        sent_bytes=replicas * (ties.upload_bytes + met * ties.lent_bytes),
        received_bytes=replicas * (ties.download_bytes + met * ties.borrowed_bytes),
    )


def _along_stages(of_ways: list[Array]) -> Array:
    """Of values for each way and stage those for the way of each stage; the only one where there is one way."""
    if len(of_ways) < 2:
        return of_ways[0] if of_ways else np.zeros(1)
    return np.stack([np.broadcast_to(values, len(of_ways))[i] for i, values in enumerate(of_ways)])


def sync_bytes(way: SyncWay, loads: Loads, setting: Setting) -> tuple[Array, Array]:
    """Bytes that all replicas of each stage send and receive in one synchronisation."""
    exchanged = setting.exchanged_bytes(loads.summed_bytes)
    gradient_bytes, merged_bytes = setting.sync_wire_ratio * exchanged, setting.merged_wire_ratio * exchanged
    sent, received = sync_bytes_each(way.sync, setting.replicas, gradient_bytes, merged_bytes)
    return setting.replicas * sent, setting.replicas * received


def sync_bytes_each(sync: Sync, replicas: int, gradient_bytes: Any, merged_bytes: Any) -> tuple[Any, Any]:
    """Bytes that each replica sends and receives in one synchronisation, on average."""
    others = replicas - 1
    match sync:
        case _ if replicas == 1:
            return 0 * gradient_bytes, 0 * gradient_bytes
        case Sync.EXCHANGE:
            return gradient_bytes, others * gradient_bytes
        case Sync.ALL_REDUCE | Sync.TREE:  # another one reads what each writes but the first, and each of these its sum
            sent = (others * gradient_bytes + merged_bytes) / replicas
            return sent, others * (gradient_bytes + merged_bytes) / replicas
        case _:
            raw_bytes = others * gradient_bytes / replicas
            received_bytes = raw_bytes + others * merged_bytes / replicas
            if sync is not Sync.HIERARCHICAL or (members := members_of_group(replicas)) == replicas:
                return raw_bytes + merged_bytes / replicas, received_bytes
            return raw_bytes + merged_bytes / replicas + merged_bytes / members, received_bytes


def way_usd(way: SyncWay, loads: Loads, setting: Setting) -> Array:
    """Dollars of each stage for the requests and the bytes of synchronising in an iteration, all replicas together."""
    store = setting.sum_store
    usd: Array = store.request_usd(*sync_requests(way, setting.replicas)) + np.zeros(1)
    if store.costs_by_byte:
        usd = usd + store.transfer_usd(*sync_bytes(way, loads, setting))  # type: ignore[arg-type]
    return setting.meeting_share * usd


def ways_usd(ways: tuple[SyncWay, ...], loads: Loads, setting: Setting) -> Array:
    """The same for each of several ways, along a last axis."""
    store = setting.sum_store
    puts, gets = _requests_of(ways, setting.replicas)
    usd: Array = store.request_usd(puts, gets) + np.zeros((*loads.summed_bytes.shape, 1))  # type: ignore[arg-type]
    if store.costs_by_byte:
        moved = {way.sync: store.transfer_usd(*sync_bytes(way, loads, setting)) for way in ways}  # type: ignore[arg-type]
        usd = usd + np.stack([np.broadcast_to(moved[way.sync], loads.summed_bytes.shape) for way in ways], axis=-1)
    return setting.meeting_share * usd


@lru_cache
def _requests_of(ways: tuple[SyncWay, ...], replicas: int) -> tuple[Array, Array]:
    puts, gets = np.array([sync_requests(way, replicas) for way in ways], dtype=np.float64).T
    return puts, gets


def storage_usd(loads: Loads, setting: Setting, ways: Sequence[SyncWay] | None = None) -> Array:
    """Dollars of each stage in one iteration for requests and bytes of both kinds; `ways` as in `sum_traffic`."""
    messages, sums = message_traffic(loads, setting), sum_traffic(loads, setting, ways)
    usd: Array = messages.request_usd(setting.message_store) + messages.transfer_usd(setting.message_store)
    return usd + sums.request_usd(setting.sum_store) + sums.transfer_usd(setting.sum_store)


def objects_fit(loads: Loads, setting: Setting) -> BoolArray:
    """Which stages write no object that is too large for its store; those for sums aside, which `way_fits` knows.

    Of messages, all that a stage sends forward for a micro-batch must fit, and all that it sends back: that is more
    than an object only where one stage writes several.
    """
    messages, sums = setting.message_store.largest_bytes, setting.sum_store.largest_bytes
    fit: BoolArray = np.ones(np.broadcast(loads.parameter_bytes, loads.traffic.forward_out_bytes).shape, dtype=bool)
    if messages is not None:
        fit &= setting.wire_ratio * loads.traffic.forward_out_bytes <= messages
        fit &= setting.back_wire_ratio * loads.traffic.backward_out_bytes <= messages
        fit &= loads.is_last * joint_bytes_each(setting)[0] <= messages
    if sums is not None:
        fit &= loads.ties.upload_bytes <= sums
    return fit


def way_fits(way: SyncWay, loads: Loads, setting: Setting) -> BoolArray:
    """Which stages write no object that is too large for its store when they synchronise in `way`."""
    return np.asarray(ways_fit((way,), loads, setting)[..., 0])


def ways_fit(ways: tuple[SyncWay, ...], loads: Loads, setting: Setting) -> BoolArray:
    """The same for each of several ways, along a last axis."""
    largest, exchanged = setting.sum_store.largest_bytes, setting.exchanged_bytes(loads.summed_bytes)[..., None]
    if largest is None or setting.replicas == 1:
        return np.ones((*exchanged.shape[:-1], len(ways)), dtype=bool)
    raw, merged = _largest_shares(ways, setting.replicas)
    share = np.maximum(raw * setting.sync_wire_ratio, merged * setting.merged_wire_ratio)
    fits: BoolArray = share * exchanged <= largest
    return fits


@lru_cache
def _largest_shares(ways: tuple[SyncWay, ...], replicas: int) -> tuple[Array, Array]:
    raw, merged = zip(*(largest_shares(way, replicas) for way in ways), strict=True)
    return np.array(raw), np.array(merged)


def largest_shares(way: SyncWay, replicas: int) -> tuple[float, float]:
    """The shares of a gradient in the largest raw and in the largest merged object; by `comm.collectives.Pattern`."""
    cut_as = usual_streams(way.sync, replicas, way.streams)
    if way.sync in (Sync.EXCHANGE, Sync.TREE):
        return 1 / cut_as.rounds, 1 / cut_as.rounds if way.sync is Sync.TREE else 0.0
    if way.sync is Sync.ALL_REDUCE:
        return 1.0, 1.0
    if way.sync is Sync.HIERARCHICAL:
        members = members_of_group(replicas)
        return -(-(members - 1) // raw_objects(members, cut_as)) / members, 1 / members
    readers = -(-(replicas - 1) // raw_objects(replicas, cut_as))
    merged = min(cut_as.merged, cut_as.rounds)
    return readers / (replicas * cut_as.rounds), -(-cut_as.rounds // merged) / (replicas * cut_as.rounds)


FILE_BYTES = 64 << 20
"""Of a file of a checkpoint, at most."""


def checkpoint_files(saved_bytes: float) -> int:
    """The files in which one replica of a stage saves so much (`runstate/checkpoints.py`)."""
    return max(1, math.ceil(saved_bytes / FILE_BYTES))


def store_estimates(
    loads: Loads, setting: Setting, iteration_s: float, ways: Sequence[SyncWay]
) -> tuple[StoreEstimate, ...]:
    """The shares of messages and sums in their stores; the hours of a store count with the first kind that is in it."""
    stores = setting.stores
    found: list[StoreEstimate] = []
    kinds = [
        ("messages", stores.messages, message_traffic(loads, setting)),
        ("sums", stores.sums, sum_traffic(loads, setting, ways)),
    ]
    for kind, name, traffic in kinds:
        store = setting.spec.store(name)
        is_first = name not in [earlier.store for earlier in found]
        found.append(
            StoreEstimate(
                kind=kind,
                store=name,
                puts=round(traffic.puts.sum()),
                gets=round(traffic.gets.sum()),
                sent_bytes=round(traffic.sent_bytes.sum()),
                received_bytes=round(traffic.received_bytes.sum()),
                request_usd=float(traffic.request_usd(store).sum()),
                transfer_usd=float(traffic.transfer_usd(store).sum()),
                hours_usd=store.price_usd_h / 3600 * iteration_s if is_first else 0.0,
            )
        )
    return tuple(found)
