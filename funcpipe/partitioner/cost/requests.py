"""How many storage requests an iteration makes, and what they cost."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from funcpipe.core import PlatformSpec, StoreSpec, Streams, Sync, SyncWay, usual_streams
from funcpipe.partitioner.cost.arrays import Array
from funcpipe.partitioner.cost.joint_loss import joint_requests
from funcpipe.partitioner.cost.loads import Loads, Setting, StageTraffic


def requests(loads: Loads, setting: Setting, ways: Sequence[SyncWay] | None = None) -> tuple[Array, Array]:
    """Puts and gets of each stage in one iteration, all replicas together.

    `ways` are those of the stages, along the last axis; None stands for the way of the setting, and none at all leaves
    synchronisation out.
    """
    puts, gets = message_requests(loads.traffic, setting)
    joint_puts, joint_gets = joint_requests(loads, setting)
    if ways is None:
        ways = (setting.way,)
    for_sums = np.array([sync_requests(way, setting.replicas) for way in ways] or [(0, 0)])
    puts = puts + joint_puts + for_sums[:, 0] + setting.replicas * loads.ties.upload_objects
    gets = gets + joint_gets + for_sums[:, 1] + setting.replicas * loads.ties.download_objects
    return puts, gets


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
