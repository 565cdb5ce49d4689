"""The costs of each stage, element by element: seconds of its lanes, bytes of its function, and all that it costs.

A micro-batch passes three lanes of a stage, each of which holds one at a time, forward and then backward; on an
accelerator it passes two more, the bus to the device and to the host:

    download ──> compute ──> upload          lanes of different micro-batches overlap
    download ──> to device ──> compute ──> to host ──> upload

Messages cross the bus as they are computed, before they are rounded for the wire. What else crosses has no lane of its
own: sums of replicas (`sum_crossing`), and outputs for a joint loss (`crossing_link`).

The memory of a function at its peak is base + state + activations + waste + data.

>>> state_bytes(copies=2, buffers=2, parameter_bytes=100, summed_bytes=100, constant_bytes=7)  # SGD, with replicas
407

A function with an accelerator has two memories, and the stage must fit both. On the device lies what computes, and a
context; on the host what travels, and what is loaded and saved. By hand, in MB, SGD with momentum on 4 replicas: 100 of
parameters, 7 of constants, 40 of activations and workspace, messages of 10 in and 20 out, forward and backward.

    device    context + 3 · 100 + 7 + (40 + 10 + 20) + 70 / 8                        = context + 386
    host      base + driver + 100 + max(100, 623)                                    = base + driver + 723

The host holds the gradient as it leaves the device, and what it needs to load or, if that is more, to train: see
`accelerator_memory.py`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from funcpipe.core import MB, ScheduleKind, StoreSpec, SyncWay
from funcpipe.core.accelerator import CONTEXT_MB
from funcpipe.partitioner.cost import Array, BoolArray
from funcpipe.partitioner.cost.accelerator_memory import host_bytes, step_bytes, working_bytes
from funcpipe.partitioner.cost.loads import Loads, Setting
from funcpipe.partitioner.cost.pipeline import StageCosts
from funcpipe.partitioner.cost.stores import (
    Pace,
    joint_bytes_each,
    link,
    objects_fit,
    pace_of,
    storage_usd,
)
from funcpipe.partitioner.cost.sync_ways import any_way_fits
from funcpipe.partitioner.cost.waits import found_late_s
from funcpipe.scheduler.pipeline import SPARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Seconds that one micro-batch takes on each lane of each stage.

    `joint_s` passes once, between the last forward and the first backward: `joint_times`. A message that is waited for
    is found late, by `forward_found_s` or `backward_found_s`; where a lane is the slowest, messages wait for it. The
    lanes of the bus take no time on functions without an accelerator.
    """

    forward_s: Array
    forward_upload_s: Array
    forward_download_s: Array
    backward_s: Array
    backward_upload_s: Array
    backward_download_s: Array
    joint_s: Array
    forward_found_s: Array
    backward_found_s: Array
    forward_to_host_s: Array
    forward_to_device_s: Array
    backward_to_host_s: Array
    backward_to_device_s: Array

    @property
    def forward_sum_s(self) -> Array:
        """Of the forward pass, all lanes one after the other."""
        links_s = self.forward_s + self.forward_upload_s + self.forward_found_s + self.forward_download_s
        return links_s + self.forward_to_host_s + self.forward_to_device_s

    @property
    def backward_sum_s(self) -> Array:
        """Of the backward pass, all lanes one after the other; the first of all waits for the loss of all."""
        messages_s = self.backward_upload_s + self.backward_found_s + self.backward_download_s
        return self.joint_s + self.backward_s + messages_s + self.backward_to_host_s + self.backward_to_device_s

    @property
    def round_s(self) -> Array:
        """From the start of a forward to the end of its backward, without what happens at later stages."""
        messages_s = self.forward_upload_s + self.backward_found_s + self.backward_download_s
        return self.forward_s + messages_s + self.backward_s + self.forward_to_host_s + self.backward_to_device_s

    def slowest(self, schedule: ScheduleKind) -> tuple[Array, Array]:
        """The slowest lane of the forward and of the backward pass.

        Where a stage runs forwards and backwards in turn, it is the slowest lane of both together and counts forward.
        """
        forward = [self.forward_s, self.forward_upload_s, self.forward_download_s]
        forward += [self.forward_to_host_s, self.forward_to_device_s]
        backward = [self.backward_s, self.backward_upload_s, self.backward_download_s]
        backward += [self.backward_to_host_s, self.backward_to_device_s]
        if schedule is ScheduleKind.GPIPE:
            return functools.reduce(np.maximum, forward), functools.reduce(np.maximum, backward)
        both = functools.reduce(np.maximum, map(np.add, forward, backward))
        return both, np.zeros_like(both)


def crossing_link(loads: Loads, store: StoreSpec, workers: int) -> tuple[Array, Array]:
    """Bytes per second, as `link` has them, of outputs for a joint loss between a stage's accelerator and `store`.

    They cross between device and host, then between host and store: a byte takes the sum of both, as one task does
    both. By hand: 60 MB/s of a link and 12,000 MB/s of a bus are 59.7 MB/s.
    """
    up, down = link(loads, store, workers)
    return up / (1 + up / loads.host_device_bytes_s), down / (1 + down / loads.host_device_bytes_s)


def lane_times(loads: Loads, setting: Setting, *, workers: int) -> Lanes:
    """Seconds of one micro-batch on each lane; `workers` functions share the store of messages.

    By hand, on an accelerator with a bus of 30 MB/s and a link of 60 MB/s: 6 MB are on the way to the host for 0.2 s,
    and on their way up, in 16 bits, for 0.05 s and a latency. The lane of the bus sets the pace, and a micro-batch
    passes both.
    """
    store, traffic = setting.message_store, loads.traffic
    up, down = link(loads, store, workers)
    bus = loads.host_device_bytes_s
    ratio, ratio_back, latency_s = setting.wire_ratio, setting.back_wire_ratio, store.latency_s
    late_s = found_late_s(store.poll_s, 1)
    pace = pace_of(store, setting.replicas, workers)

    def moved_s(payload_bytes: Array, objects: Array, bytes_s: Array, each_s: float) -> Array:
        found: Array = np.maximum(payload_bytes / bytes_s + latency_s * objects, each_s * objects)
        return found

    forward_s = setting.spec.contention * loads.forward_s
    backward_s = setting.spec.contention * loads.backward_s
    return Lanes(
        forward_s=forward_s,
        forward_upload_s=moved_s(ratio * traffic.forward_out_bytes, traffic.forward_out_objects, up, pace.put_s),
        forward_download_s=moved_s(ratio * traffic.forward_in_bytes, traffic.forward_in_objects, down, pace.get_s),
        backward_s=backward_s + np.where(loads.recompute, forward_s, 0.0),
        backward_upload_s=moved_s(
            ratio_back * traffic.backward_out_bytes, traffic.backward_out_objects, up, pace.put_s
        ),
        backward_download_s=moved_s(
            ratio_back * traffic.backward_in_bytes, traffic.backward_in_objects, down, pace.get_s
        ),
        joint_s=joint_times(loads, setting, *crossing_link(loads, store, workers), pace),
        forward_found_s=late_s * (traffic.forward_in_objects > 0),
        backward_found_s=late_s * (traffic.backward_in_objects > 0),
        forward_to_host_s=traffic.forward_out_bytes / bus,
        forward_to_device_s=traffic.forward_in_bytes / bus,
        backward_to_host_s=traffic.backward_out_bytes / bus,
        backward_to_device_s=traffic.backward_in_bytes / bus,
    )


def joint_times(loads: Loads, setting: Setting, up: Array, down: Array, pace: Pace) -> Array:
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
    store = setting.message_store
    put_s, read_s = pace.puts(own_bytes / up, 1), pace.gets(others_bytes / down, setting.replicas - 1)
    hop_s = 2 * store.latency_s + found_late_s(store.poll_s, setting.replicas, read_s)
    exchange_s: Array = loads.is_last * (hop_s + put_s + read_s)
    return exchange_s


def compute_work_s(loads: Loads, lanes: Lanes, setting: Setting) -> Array:
    """Seconds of one processor that each stage computes in one iteration, all replicas together.

    A function with half a processor that computes for 3 s takes 1.5 s of it.
    """
    work_s: Array = setting.micro_batches * (lanes.forward_s + lanes.backward_s) * loads.processors
    return work_s


def stage_costs(
    loads: Loads, lanes: Lanes, sync_s: Array, setting: Setting, ways: Sequence[SyncWay] | None = None
) -> StageCosts:
    """The costs of stages, by their lanes and their synchronisation; `share` is left at 0 for the caller to set.

    `ways` are those of the stages, as in `requests`. The hours of stores count with the last stage, as each plan has
    exactly one.
    """
    forward_lane_s, backward_lane_s = lanes.slowest(setting.schedule)
    share = setting.meeting_share
    return StageCosts(
        forward_sum_s=lanes.forward_sum_s + (1 - share) * lanes.backward_sum_s,
        forward_lane_s=forward_lane_s,
        backward_sum_s=share * lanes.backward_sum_s,
        backward_lane_s=backward_lane_s,
        round_s=lanes.round_s,
        sync_s=sync_s,
        price_usd_s=setting.replicas * loads.price_usd_s + setting.stores_usd_s * loads.is_last,
        request_usd=storage_usd(loads, setting, ways),
        work_s=compute_work_s(loads, lanes, setting),
        share=np.zeros(1),
    )


DRIVER_BYTES = 1024 * MB
"""What the libraries of an accelerator take of the host's memory: an assumption until measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that one function of each stage needs at its peak, by what takes them.

    Where stages compute on accelerators, these are the bytes of the host, and `device` has those of the device.
    """

    base_bytes: Array
    state_bytes: Array
    activation_bytes: Array
    waste_bytes: Array
    data_bytes: Array
    device: "MemoryUse | None" = None

    @property
    def total_bytes(self) -> Array:
        """All of it."""
        return self.base_bytes + self.state_bytes + self.activation_bytes + self.waste_bytes + self.data_bytes

    def fits(self, loads: Loads) -> BoolArray:
        """Which stages fit their functions, and the accelerators of these."""
        fits: BoolArray = self.total_bytes <= loads.memory_bytes
        return fits if self.device is None else fits & (self.device.total_bytes <= loads.device_memory_bytes)

    def tightest(self, loads: Loads) -> tuple[Array, Array, BoolArray]:
        """Of the memories of each stage's function the one that is filled most: bytes needed, bytes there are, and
        whether it is that of the accelerator.
        """
        needs, has = np.broadcast_arrays(self.total_bytes, loads.memory_bytes)
        if self.device is None:
            return needs, has, np.zeros(needs.shape, dtype=bool)
        device = self.device.total_bytes / loads.device_memory_bytes > needs / has
        needs_bytes = np.where(device, self.device.total_bytes, needs)
        return needs_bytes, np.where(device, loads.device_memory_bytes, has), device


WASTE = 1 / 8
"""The share that the allocator loses between activations, which come and go; what stays as long as the function lies
without gaps (measured by experiments/studies/model_table.py at ba832dcf).
"""


def parameter_copies(setting: Setting) -> float:
    """How often a function holds its parameters: themselves, their gradients, and the optimiser's values."""
    return 2 + setting.values_per_parameter


def buffer_copies(setting: Setting) -> float:
    """How often a function that synchronises holds its gradients in addition to the flat vector they are made in.

    Its own split from all others and the messages that brought it take (d − 1)/d each, two messages that go out 1/d
    each: two copies for d > 1 replicas. Sums in 16 bits halve these, but a function's peak falls by a quarter to half a
    copy only (experiments/studies/shard_optimizer.py at 949584e9), so they count as much.
    """
    return 2 if setting.replicas > 1 else 0


def state_bytes(
    *, copies: float, buffers: float, parameter_bytes: Any, summed_bytes: Any, constant_bytes: Any, tied_bytes: Any = 0
) -> Any:
    """Bytes that a function holds all the time: parameters, gradients, optimiser, buffers, constants, tied messages."""
    return copies * parameter_bytes + buffers * summed_bytes + constant_bytes + tied_bytes


def waste_bytes(activation_bytes: Any) -> Any:
    """Bytes that the allocator loses between activations."""
    return WASTE * activation_bytes


def data_bytes(loads: Loads, setting: Setting, held: Array | float) -> Array:
    """Bytes that stages hold of their data: the dataset, the batch that is being loaded, and those that are loaded.

    These are as many as `scheduler.loading` lets a stage load that holds `held` micro-batches at once.
    """
    if setting.data is None:
        return np.zeros_like(loads.loads_data)
    ahead = np.minimum(setting.micro_batches_each, held + 1) + SPARE
    dataset_bytes = setting.data.resident_bytes + setting.data.batch_bytes
    total: Array = loads.loads_data * (dataset_bytes + ahead * loads.loaded_bytes)
    return total


def memory_use(loads: Loads, setting: Setting, held: Array | float) -> MemoryUse:
    """Peak bytes of stages that hold `held` micro-batches at once.

    A micro-batch is held as its activations, or under recomputation as its inputs, with the activations of one of them
    in addition. The workspace of one layer counts with the activations, and so does what a joint loss is computed from.
    Of a function without accelerator this is all; one with an accelerator is split, see above.
    """
    state = state_bytes(
        copies=parameter_copies(setting),
        buffers=buffer_copies(setting),
        parameter_bytes=loads.parameter_bytes,
        summed_bytes=loads.summed_bytes,
        constant_bytes=loads.constant_bytes,
        tied_bytes=loads.ties.upload_bytes + loads.ties.download_bytes,
    )
    kept = np.where(loads.recompute, loads.input_bytes, loads.activation_bytes + loads.held_input_bytes)
    at_work = loads.workspace_bytes + np.where(loads.recompute, loads.activation_bytes, 0.0)
    activation_bytes = held * kept + at_work + joint_memory_bytes(loads, setting)
    use = MemoryUse(
        base_bytes=np.full_like(kept, setting.base_bytes),
        state_bytes=state + np.zeros_like(kept),
        activation_bytes=activation_bytes,
        waste_bytes=waste_bytes(activation_bytes),
        data_bytes=data_bytes(loads, setting, held) + np.zeros_like(kept),
    )
    return _split(use, loads, setting, held) if loads.on_device.any() else use


def _split(use: MemoryUse, loads: Loads, setting: Setting, held: Array | float) -> MemoryUse:
    """`use` of functions, where those with accelerators keep on the device what computes, and else what travels."""
    host_state = state_bytes(
        copies=0,
        buffers=1 if setting.replicas > 1 else 0,
        parameter_bytes=loads.parameter_bytes,
        summed_bytes=loads.summed_bytes,
        constant_bytes=0,
        tied_bytes=loads.ties.upload_bytes + loads.ties.download_bytes,
    )
    device_state = state_bytes(
        copies=parameter_copies(setting),
        buffers=0,
        parameter_bytes=loads.parameter_bytes,
        summed_bytes=loads.summed_bytes,
        constant_bytes=loads.constant_bytes,
    )
    on_device, joint, saved = loads.on_device, joint_memory_bytes(loads, setting), parameter_copies(setting) - 1
    of_host = host_bytes(loads, setting, copies=saved, buffers=buffer_copies(setting), joint_bytes=joint)
    like = np.broadcast_arrays(use.state_bytes + np.zeros(on_device.shape), on_device)[0]
    working, step = working_bytes(loads, setting, held) + joint, step_bytes(loads, setting)
    return MemoryUse(
        base_bytes=np.where(on_device, use.base_bytes + DRIVER_BYTES, use.base_bytes),
        state_bytes=np.where(on_device, host_state, use.state_bytes),
        activation_bytes=np.where(on_device, of_host, use.activation_bytes),
        waste_bytes=np.where(on_device, 0.0, use.waste_bytes),
        data_bytes=use.data_bytes,
        device=MemoryUse(
            base_bytes=np.full_like(like, CONTEXT_MB * MB),
            state_bytes=device_state + np.zeros_like(like),
            activation_bytes=working + step if setting.shares > 1 else np.maximum(working, step - waste_bytes(working)),
            waste_bytes=waste_bytes(working),
            data_bytes=np.zeros_like(like),
        ),
    )


def joint_memory_bytes(loads: Loads, setting: Setting) -> Array:
    """Bytes that a function of each stage holds for the loss: outputs and targets of all micro-batches, as they came
    and as one batch, the gradients of that, and its own message.
    """
    each, all_bytes = setting.micro_batches_each, setting.micro_batches * (setting.joint_bytes or 0.0)
    sent_bytes = each * (setting.joint_bytes or 0.0) if setting.replicas > 1 else 0.0
    total: Array = loads.is_last * (3 * all_bytes + sent_bytes)
    return total


def admitted(loads: Loads, setting: Setting) -> BoolArray:
    """Which stages are possible at all: objects must fit their stores, and a stage that shares parameters with others
    cannot divide its optimiser, though it can divide what replicas that train alone keep for meetings.
    """
    divides = setting.sharded and not setting.alone
    possible: BoolArray = ~(divides & (loads.ties.upload_objects > 0)) & objects_fit(loads, setting)
    possible &= any_way_fits(loads, setting)
    return possible
