"""What stages move through the stores of messages and of sums: bytes, requests, and what they cost.

Activations and their gradients are messages. What replicas exchange to sum gradients, and the gradients of tied
parameters, which travel at the same time, are sums. By hand: four replicas of a stage sum 120 bytes each by streams.
Each sends three quarters of its own gradient, 90 bytes, and its quarter of the sums, 30; and receives three other
replicas' share of its quarter, 90 bytes, and the three other quarters of the sums, 90.

>>> sync_bytes_each(Sync.STREAMED, 4, 120.0, 120.0)
(120.0, 180.0)
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from funcpipe.core import StoreEstimate, StoreSpec, Streams, Sync, usual_streams
from funcpipe.partitioner.cost.arrays import Array, BoolArray
from funcpipe.partitioner.cost.loads import Loads, Setting
from funcpipe.partitioner.cost.requests import message_requests, raw_objects, sync_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What each stage moves in one iteration, all replicas together, of one kind; an element for each stage."""

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


def message_traffic(loads: Loads, setting: Setting) -> Traffic:
    """Activations and their gradients between stages."""
    puts, gets = message_requests(loads.traffic, setting)
    each, traffic, back = setting.micro_batches, loads.traffic, setting.back_wire_ratio
    forward = setting.wire_ratio
    return Traffic(
        puts=puts,
        gets=gets,
        sent_bytes=each * (forward * traffic.forward_out_bytes + back * traffic.backward_out_bytes),
        received_bytes=each * (forward * traffic.forward_in_bytes + back * traffic.backward_in_bytes),
    )


def sum_traffic(loads: Loads, setting: Setting) -> Traffic:
    """What replicas exchange to sum gradients, and gradients of tied parameters on their way between stages."""
    ties, replicas = loads.ties, setting.replicas
    puts, gets = sync_requests(setting)
    sent, received = sync_bytes_each(
        setting.sync,
        replicas,
        setting.sync_wire_ratio * loads.summed_bytes,
        setting.merged_wire_ratio * loads.summed_bytes,
    )
    return Traffic(
        puts=puts + replicas * ties.upload_objects,
        gets=gets + replicas * ties.download_objects,
        sent_bytes=replicas * (sent + ties.upload_bytes),
        received_bytes=replicas * (received + ties.download_bytes),
    )


def sync_bytes_each(sync: Sync, replicas: int, gradient_bytes: Any, merged_bytes: Any) -> tuple[Any, Any]:
    """Bytes that each replica sends and receives in one synchronisation, on average."""
    others = replicas - 1
    match sync:
        case _ if replicas == 1:
            return 0 * gradient_bytes, 0 * gradient_bytes
        case Sync.EXCHANGE:
            return gradient_bytes, others * gradient_bytes
        case Sync.ALL_REDUCE:  # the first replica reads what all others write, and they its sum
            return (others * gradient_bytes + merged_bytes) / replicas, others * (
                gradient_bytes + merged_bytes
            ) / replicas
        case _:
            raw_bytes = others * gradient_bytes / replicas
            return raw_bytes + merged_bytes / replicas, raw_bytes + others * merged_bytes / replicas


def storage_usd(loads: Loads, setting: Setting) -> Array:
    """Dollars of each stage in one iteration for requests and bytes of both kinds."""
    messages, sums = message_traffic(loads, setting), sum_traffic(loads, setting)
    usd: Array = messages.request_usd(setting.message_store) + messages.transfer_usd(setting.message_store)
    return usd + sums.request_usd(setting.sum_store) + sums.transfer_usd(setting.sum_store)


def objects_fit(loads: Loads, setting: Setting) -> BoolArray:
    """Which stages write no object that is too large for its store.

    Of messages, all that a stage sends forward for a micro-batch must fit, and all that it sends back: that is more
    than an object only where one stage writes several.
    """
    messages, sums = setting.message_store.largest_bytes, setting.sum_store.largest_bytes
    fit: BoolArray = np.ones(np.broadcast(loads.parameter_bytes, loads.traffic.forward_out_bytes).shape, dtype=bool)
    if messages is not None:
        fit &= setting.wire_ratio * loads.traffic.forward_out_bytes <= messages
        fit &= setting.back_wire_ratio * loads.traffic.backward_out_bytes <= messages
    if sums is not None and setting.replicas > 1:
        raw_share, merged_share = largest_shares(setting.sync, setting.replicas, setting.streams)
        fit &= raw_share * setting.sync_wire_ratio * loads.summed_bytes <= sums
        fit &= merged_share * setting.merged_wire_ratio * loads.summed_bytes <= sums
    if sums is not None:
        fit &= loads.ties.upload_bytes <= sums
    return fit


def largest_shares(sync: Sync, replicas: int, streams: Streams | None) -> tuple[float, float]:
    """The shares of a gradient in the largest raw and in the largest merged object; by `comm.collectives.Pattern`."""
    cut_as = usual_streams(sync, replicas, streams)
    if sync is Sync.EXCHANGE:
        return 1 / cut_as.rounds, 0.0
    if sync is Sync.ALL_REDUCE:
        return 1.0, 1.0
    readers = -(-(replicas - 1) // raw_objects(replicas, cut_as))
    merged = min(cut_as.merged, cut_as.rounds)
    return readers / (replicas * cut_as.rounds), -(-cut_as.rounds // merged) / (replicas * cut_as.rounds)


def store_estimates(loads: Loads, setting: Setting, iteration_s: float) -> tuple[StoreEstimate, ...]:
    """What messages and sums take of their stores; the hours of a store count with the first kind that is in it."""
    stores = setting.stores
    found: list[StoreEstimate] = []
    kinds = [("messages", stores.messages, message_traffic), ("sums", stores.sums, sum_traffic)]
    for kind, name, traffic_of in kinds:
        store, traffic = setting.spec.store(name), traffic_of(loads, setting)
        is_first = name not in [earlier.store for earlier in found]
        found.append(
            StoreEstimate(
                kind=kind,
                store=name,
                puts=int(traffic.puts.sum()),
                gets=int(traffic.gets.sum()),
                sent_bytes=round(traffic.sent_bytes.sum()),
                received_bytes=round(traffic.received_bytes.sum()),
                request_usd=float(traffic.request_usd(store).sum()),
                transfer_usd=float(traffic.transfer_usd(store).sum()),
                hours_usd=store.price_usd_h / 3600 * iteration_s if is_first else 0.0,
            )
        )
    return tuple(found)
