"""The input of the cost model: the loads of stages on their functions, and the setting that holds for a whole plan.

Every field of `Loads` is an array with one element for each stage. The stages may be those of one plan (shape
`[stages]`), of many plans side by side (`[plans, stages]`), or all stages that there could be on all function sizes
(`[edges, sizes]`): the formulas work element by element, so the same ones serve all three.

Parameters that several layers use are `Ties`. By hand: layers 0 and 3 share 8 bytes. As stages [0, 2) and [2, 4), both
hold them, the second one borrows the sum: it sends its gradient and reads the sum, the first one reads that gradient
and sends the sum. In one stage [0, 4) they are merely counted twice by the sum over layers.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from funcpipe.core import (
    DEFAULT_STORES,
    MB,
    CodecCost,
    DataProfile,
    FunctionSize,
    ModelProfile,
    PlatformSpec,
    ScheduleKind,
    Stores,
    StoreSpec,
    Streams,
    Sync,
    SyncWay,
)
from funcpipe.core.cached import cached_property
from funcpipe.partitioner.cost import Array, BoolArray, IntArray
from funcpipe.partitioner.cost.backward_peaks import BackwardPeaks
from funcpipe.partitioner.cost.rounding import Rounding, rounding_of
from funcpipe.scheduler.pipeline import in_flight

STEPS_OF_ONE_ROUND = 1_000_000
"""The steps of a round that lasts as long as a run, however long that is: so many that its meeting takes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """The shares of stages in parameters that several layers use.

    `repeated_bytes` is what a sum over layers counts too often; the gradients of `borrowed_bytes` are summed over the
    replicas by an earlier stage; the rest is what one function sends and reads of their gradients in an iteration. Of
    what it sends, `lent_objects` are sums for later stages. In a meeting of replicas that train alone, sums travel once
    more, of the parameters.
    """

    repeated_bytes: Array
    borrowed_bytes: Array
    upload_bytes: Array
    upload_objects: Array
    download_bytes: Array
    download_objects: Array
    lent_objects: Array

    @property
    def lent_bytes(self) -> Array:
        """Bytes of `lent_objects`."""
        return self.upload_bytes - self.borrowed_bytes

    @property
    def returned_objects(self) -> Array:
        """Sums that a function reads."""
        return self.upload_objects - self.lent_objects


def stage_ties(first: IntArray, stop: IntArray, profile: ModelProfile) -> Ties:
    """For stages [first, stop), an element each.

    A gradient goes from holder to holder, starting at the last one, and the sum goes from the first holder to each of
    the others: what a stage sends and reads depends on whether there are holders before it and behind it.
    """
    sizes: dict[tuple[int, ...], int] = defaultdict(int)
    for tie in profile.ties:
        sizes[tie.layers] += tie.parameter_bytes
    repeated, borrowed, up, ups, down, downs, lent = np.zeros((7, len(first)))
    for layers, size in sizes.items():
        inside = np.searchsorted(layers, stop) - np.searchsorted(layers, first)
        before = (inside > 0) & (layers[0] < first)
        behind = (inside > 0) & (layers[-1] >= stop)
        puts = before + (behind & ~before)
        gets = before.astype(np.int64) + behind
        repeated += size * np.maximum(inside - 1, 0)
        borrowed += size * before
        up, ups = up + size * puts, ups + puts
        down, downs = down + size * gets, downs + gets
        lent += behind & ~before
    return Ties(
        repeated_bytes=repeated,
        borrowed_bytes=borrowed,
        upload_bytes=up,
        upload_objects=ups,
        download_bytes=down,
        download_objects=downs,
        lent_objects=lent,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTraffic:
    """Bytes in 32-bit numbers, and objects, that stages write (`out`) and read (`in`) for one micro-batch."""

    forward_out_bytes: Array
    forward_out_objects: Array
    forward_in_bytes: Array
    forward_in_objects: Array
    backward_out_bytes: Array
    backward_out_objects: Array
    backward_in_bytes: Array
    backward_in_objects: Array

    @classmethod
    def none(cls, stages: int) -> "StageTraffic":
        """Zeros for this number of stages, to be counted up."""
        return cls(**{item.name: np.zeros(stages) for item in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """The work and memory of stages, and the functions they run on; seconds, bytes and dollars as named.

    `layer_parameter_bytes` is the sum over layers, in which `ties` occur more than once. `input_bytes` is all that a
    stage keeps of a micro-batch under recomputation: what it reads from other stages and of the model's inputs;
    `held_input_bytes` is what it keeps of that without recomputation, in addition to `activation_bytes`;
    `workspace_bytes` is the largest amount that any of its layers needs in addition while it runs. `loads_data` is 1
    for stages that load data, 0 for others; `loaded_bytes` is what they keep of a loaded micro-batch. `is_last` is 1
    for stages that end with the model's last layer, of which each plan has one, 0 for others.

    On an accelerator it keeps `device_activation_bytes` from forward to backward instead, and `peaks` beyond that.

    Of functions without an accelerator `device_memory_bytes` and `host_device_bytes_s` are infinite: see
    `functions_of`.
    """

    forward_s: Array
    backward_s: Array
    layer_parameter_bytes: Array
    ties: Ties
    constant_bytes: Array
    activation_bytes: Array
    input_bytes: Array
    held_input_bytes: Array
    workspace_bytes: Array
    device_activation_bytes: Array
    peaks: BackwardPeaks
    loads_data: Array
    loaded_bytes: Array
    is_last: Array
    recompute: BoolArray
    traffic: StageTraffic
    vcpu: Array
    memory_bytes: Array
    upload_bytes_s: Array
    download_bytes_s: Array
    price_usd_s: Array
    device_memory_bytes: Array
    host_device_bytes_s: Array

    @property
    def on_device(self) -> BoolArray:
        """Which stages compute on an accelerator."""
        return np.isfinite(self.device_memory_bytes)

    @property
    def processors(self) -> Array:
        """The processors that a computation keeps busy: the share of a function that has less than one, else one."""
        return np.minimum(self.vcpu, 1.0)

    @property
    def parameter_bytes(self) -> Array:
        """Distinct trainable parameters."""
        return self.layer_parameter_bytes - self.ties.repeated_bytes

    @property
    def summed_bytes(self) -> Array:
        """Of those, the ones whose gradient is summed over the replicas of the stage."""
        return self.parameter_bytes - self.ties.borrowed_bytes


def functions_of(sizes: Sequence[FunctionSize]) -> dict[str, Array]:
    """The fields of `Loads` that describe functions, an element for each of `sizes`."""
    devices = [size.accelerator for size in sizes]
    return {
        "vcpu": np.array([size.vcpu for size in sizes]),
        "memory_bytes": np.array([size.memory_bytes for size in sizes], dtype=np.float64),
        "upload_bytes_s": np.array([size.upload_bytes_s for size in sizes]),
        "download_bytes_s": np.array([size.download_bytes_s for size in sizes]),
        "price_usd_s": np.array([size.price_usd_s for size in sizes]),
        "device_memory_bytes": np.array([np.inf if one is None else one.memory_mb * MB for one in devices]),
        "host_device_bytes_s": np.array(
            [np.inf if one is None else 1e9 * (one.host_device_gb_s or 0) for one in devices]
        ),
    }


def meeting_share(sync_every: int | str, replicas: int, fragments: int = 1) -> float:
    """The share of steps after which so many replicas meet, on one of so many `fragments`; all of them where they sum
    gradients, or one trains.
    """
    if replicas == 1:
        return 1.0
    return fragments / (STEPS_OF_ONE_ROUND if isinstance(sync_every, str) else sync_every)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The choices that hold for all stages of a plan. `micro_batches` counts those of all replicas together.

    `sync` and `streams` are the way of synchronising of all stages; where `sync` is None, each has its own.

    `values_per_parameter` is what each function keeps for the optimiser. `gradient_wire_ratio` is the wire ratio of the
    gradients that stages return, where it differs from that of activations, `sync_wire_ratio` that of the gradients
    that replicas sum. Where the optimiser is `sharded` over replicas, no stage may share parameters with another one,
    unless replicas train alone: then it is what they keep for meetings that is divided.
    `data` is None where loading was not measured. `stores` are those of the platform that the plan uses. `joint_bytes`
    is what outputs and targets of a micro-batch take, where the loss is computed for the whole global batch; else None.

    Where replicas train alone between meetings, `meeting_share` is the share of steps that end with one, and `alone` is
    true: then they exchange what their optimisers have made of the parameters, and begin when these are done. In a
    meeting they exchange one of so many `fragments` of a stage's parameters, all of which are taken to be as large; the
    exchange goes on beside as many steps as its `delay` says, if that is not 0.

    `codec` is what rounding costs; None where sums are not rounded.
    """

    micro_batches: int
    replicas: int
    values_per_parameter: float
    sync: Sync | None
    wire_ratio: float
    base_bytes: int
    spec: PlatformSpec
    schedule: ScheduleKind = ScheduleKind.GPIPE
    gradient_wire_ratio: float | None = None
    sync_wire_ratio: float = 1.0
    streams: Streams | None = None
    sharded: bool = False
    data: DataProfile | None = None
    stores: Stores = DEFAULT_STORES
    joint_bytes: int | None = None
    alone: bool = False
    meeting_share: float = 1.0
    fragments: int = 1
    codec: CodecCost | None = None
    delay: int = 0

    @cached_property
    def message_store(self) -> StoreSpec:
        """Where activations and their gradients travel."""
        return self.spec.store(self.stores.messages)

    @cached_property
    def sum_store(self) -> StoreSpec:
        """Through which replicas sum their gradients."""
        return self.spec.store(self.stores.sums)

    @property
    def stores_usd_s(self) -> float:
        """Dollars a second of the stores that cost by the hour, while the plan runs."""
        return self.spec.stores_usd_h(self.stores) / 3600

    @property
    def back_wire_ratio(self) -> float:
        """The wire ratio of the gradients that stages return."""
        return self.wire_ratio if self.gradient_wire_ratio is None else self.gradient_wire_ratio

    @property
    def way(self) -> SyncWay:
        """The way of synchronising of all stages, where each has not its own."""
        assert self.sync is not None
        return SyncWay(self.sync, self.streams)

    @property
    def shares(self) -> int:
        """The number of replicas over which the optimiser is divided."""
        return self.replicas if self.sharded and not self.alone else 1

    @property
    def micro_batches_each(self) -> int:
        """Micro-batches that each replica works through."""
        return self.micro_batches // self.replicas

    @property
    def merged_wire_ratio(self) -> float:
        """That of what each replica sends to the others in the end: sums, or updated parameters, which are not rounded
        (`Plan.merged_wire`).
        """
        return 1.0 if self.sharded else self.sync_wire_ratio

    def exchanged_bytes(self, summed_bytes: Any) -> Any:
        """Of `summed_bytes`, which stages sum, those that they sum at once: all, or a fragment."""
        return summed_bytes / self.fragments

    def rounding(self, vcpu: Array | float) -> Rounding | None:
        """The seconds of rounding on functions with so many vCPUs; None where sums are not rounded."""
        return rounding_of(self.codec, wire_ratio=self.sync_wire_ratio, sums=not self.sharded, vcpu=vcpu)

    @property
    def loading_s(self) -> float:
        """The least seconds of an iteration: what a function needs to load the data of its micro-batches."""
        return 0.0 if self.data is None else self.micro_batches_each * self.data.load_s

    @property
    def repeats(self) -> int:
        """How many micro-batches follow the first one through the pipeline, each at the pace of the slowest lane."""
        return self.micro_batches_each - 1

    @property
    def lone_share(self) -> float:
        """The share of steps that end with a meeting on the first fragment of replicas that train alone; 0 where they
        do not.
        """
        return self.meeting_share / self.fragments if self.alone else 0.0

    @property
    def meeting_repeats(self) -> float:
        """The part of `repeats` in steps that end with a meeting, of the mean of all."""
        return self.repeats * self.meeting_share

    @property
    def local_repeats(self) -> float:
        """The part of `repeats` in steps without a meeting."""
        return self.repeats * (1 - self.meeting_share)

    @property
    def seconds_per_work(self) -> float:
        """By how much a second of computation on one processor prolongs an iteration at least.

        That is 1/n where all functions share n processors, and 0 where each function has its own.
        """
        return 0.0 if self.spec.shared_cores is None else 1 / self.spec.shared_cores

    def held_micro_batches(self, stages: int) -> Array:
        """How many micro-batches' activations each stage of a plan of `stages` stages holds at once.

        It depends on the number of stages behind a stage alone.
        """
        each = self.micro_batches_each
        held = [in_flight(self.schedule, stage=i, stages=stages, micro_batches=each) for i in range(stages)]
        return np.array(held, dtype=np.float64)

    def round_shares(self, stages: int) -> Array:
        """For each stage of such a plan 1/h, where it may hold h micro-batches; 0 where it may hold all of them.

        In the time that one micro-batch needs from its forward at the stage to its backward there, a stage begins no
        more than h: so 1/h of that time is the least between two of them (see `pipeline`).
        """
        held = self.held_micro_batches(stages)
        return np.where(held < self.micro_batches_each, 1 / held, 0.0)
