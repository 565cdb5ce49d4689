"""Seconds of each lane of each stage, and all that a stage costs, element by element."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from funcpipe.core import ScheduleKind, SyncWay
from funcpipe.partitioner.cost import Array
from funcpipe.partitioner.cost.loads import Loads, Setting
from funcpipe.partitioner.cost.pipeline import StageCosts
from funcpipe.partitioner.cost.stores import joint_bytes_each, link, storage_usd
from funcpipe.partitioner.cost.sync_time import sync_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Seconds that one micro-batch takes on each lane of each stage.

    `joint_s` passes once, between the last forward and the first backward: `joint_times`.
    """

    forward_s: Array
    forward_upload_s: Array
    forward_download_s: Array
    backward_s: Array
    backward_upload_s: Array
    backward_download_s: Array
    joint_s: Array

    @property
    def forward_sum_s(self) -> Array:
        """Of the forward pass, all lanes one after the other."""
        return self.forward_s + self.forward_upload_s + self.forward_download_s

    @property
    def backward_sum_s(self) -> Array:
        """Of the backward pass, all lanes one after the other; the first of all waits for the loss of all."""
        return self.joint_s + self.backward_s + self.backward_upload_s + self.backward_download_s

    @property
    def round_s(self) -> Array:
        """From the start of a forward to the end of its backward, without what happens at later stages."""
        return self.forward_s + self.forward_upload_s + self.backward_download_s + self.backward_s

    def slowest(self, schedule: ScheduleKind) -> tuple[Array, Array]:
        """The slowest lane of the forward and of the backward pass.

        Where a stage runs forwards and backwards in turn, it is the slowest lane of both together and counts forward.
        """
        upload_s, download_s = self.forward_upload_s, self.forward_download_s
        if schedule is ScheduleKind.GPIPE:
            backward_lanes = np.maximum(self.backward_upload_s, self.backward_download_s)
            forward_lane_s = np.maximum(np.maximum(self.forward_s, upload_s), download_s)
            return forward_lane_s, np.maximum(self.backward_s, backward_lanes)
        compute_s = self.forward_s + self.backward_s
        links_s = np.maximum(upload_s + self.backward_upload_s, download_s + self.backward_download_s)
        return np.maximum(compute_s, links_s), np.zeros_like(compute_s)


def lane_times(loads: Loads, setting: Setting, *, workers: int) -> Lanes:
    """Seconds of one micro-batch on each lane; `workers` functions share the store of messages."""
    store, traffic = setting.message_store, loads.traffic
    up, down = link(loads, store, workers)
    ratio, ratio_back, latency_s = setting.wire_ratio, setting.back_wire_ratio, store.latency_s
    forward_s = setting.spec.contention * loads.forward_s
    backward_s = setting.spec.contention * loads.backward_s
    return Lanes(
        forward_s=forward_s,
        forward_upload_s=ratio * traffic.forward_out_bytes / up + latency_s * traffic.forward_out_objects,
        forward_download_s=ratio * traffic.forward_in_bytes / down + latency_s * traffic.forward_in_objects,
        backward_s=backward_s + np.where(loads.recompute, forward_s, 0.0),
        backward_upload_s=ratio_back * traffic.backward_out_bytes / up + latency_s * traffic.backward_out_objects,
        backward_download_s=ratio_back * traffic.backward_in_bytes / down + latency_s * traffic.backward_in_objects,
        joint_s=joint_times(loads, setting, up, down),
    )


def joint_times(loads: Loads, setting: Setting, up: Array, down: Array) -> Array:
    """Seconds from the last forward of each stage to its first backward; 0 for all stages but the last.

    For a loss that is computed once for the global batch, each replica of the last stage puts the outputs and targets
    of its micro-batches as one object, reads that of each other replica, and computes the loss of all. By hand: 4
    micro-batches of 30 bytes on 2 replicas, links of 10 bytes/s, 0.1 s of latency. Each puts 60 bytes in 6.1 s, then
    reads 60 bytes in 6.1 s: the first backward begins 12.2 s after the last forward. With 4 replicas each puts 30 bytes
    in 3.1 s, and reads 3 objects of 30 bytes, whose latencies pass side by side, in 9.1 s.
    """
    own_bytes, others_bytes = joint_bytes_each(setting)
    if not others_bytes:
        return np.zeros(np.broadcast(loads.is_last, up).shape)
    latency_s = setting.message_store.latency_s
    exchange_s: Array = loads.is_last * (2 * latency_s + own_bytes / up + others_bytes / down)
    return exchange_s


def tied_times(loads: Loads, setting: Setting, up: Array, down: Array) -> tuple[Array, Array]:
    """Seconds in which each stage writes and reads the gradients of tied parameters, and those of the backward during
    which other gradients may travel: none where stages share parameters or return gradients of activations, as nothing
    travels before it has ended.
    """
    ties, store = loads.ties, setting.sum_store
    tied_s = ties.upload_bytes / up + ties.download_bytes / down
    tied_s = tied_s + store.latency_s * (ties.upload_objects + ties.download_objects)
    waits = (ties.download_objects > 0) | (loads.traffic.backward_out_objects > 0)
    backward_s = np.where(waits, 0.0, setting.spec.contention * loads.backward_s)
    return tied_s, backward_s


def sync_times(loads: Loads, setting: Setting, *, workers: int, way: SyncWay | None = None) -> Array:
    """Seconds in which each stage's replicas sum their gradients, from its last backward on, in `way`.

    They include those in which it writes and reads the gradients of tied parameters, one after the other. `workers`
    functions share the store of sums. None stands for the way of the setting.
    """
    up, down = link(loads, setting.sum_store, workers)
    tied_s, backward_s = tied_times(loads, setting, up, down)
    way = setting.way if way is None else way
    return tied_s + sync_time_s(
        way.sync,
        gradient_bytes=setting.sync_wire_ratio * loads.summed_bytes,
        merged_bytes=setting.merged_wire_ratio * loads.summed_bytes,
        replicas=setting.replicas,
        upload_bytes_s=up,
        download_bytes_s=down,
        latency_s=setting.sum_store.latency_s,
        streams=way.streams,
        backward_s=backward_s,
    )


def compute_work_s(lanes: Lanes, setting: Setting) -> Array:
    """Seconds of one processor that each stage computes in one iteration, all replicas together."""
    return setting.micro_batches * (lanes.forward_s + lanes.backward_s)


def stage_costs(
    loads: Loads, lanes: Lanes, sync_s: Array, setting: Setting, ways: Sequence[SyncWay] | None = None
) -> StageCosts:
    """What the stages cost, by their lanes and their synchronisation; `share` is left at 0 for the caller to set.

    `ways` are those of the stages, as in `requests`. The hours of stores count with the last stage, as each plan has
    exactly one.
    """
    forward_lane_s, backward_lane_s = lanes.slowest(setting.schedule)
    return StageCosts(
        forward_sum_s=lanes.forward_sum_s,
        forward_lane_s=forward_lane_s,
        backward_sum_s=lanes.backward_sum_s,
        backward_lane_s=backward_lane_s,
        round_s=lanes.round_s,
        sync_s=sync_s,
        price_usd_s=setting.replicas * loads.price_usd_s + setting.stores_usd_s * loads.is_last,
        request_usd=storage_usd(loads, setting, ways),
        work_s=compute_work_s(lanes, setting),
        share=np.zeros(1),
    )
