"""The performance model, elementwise: every function takes arrays with one element for each stage and returns the like.

After FuncPipe (Liu et al., Proc. ACM Meas. Anal. Comput. Syst. 6(3), 2022), section 3, with its chain of layers widened
to any graph and with recomputation, wire formats, request prices and shared links added; docs/planning.md derives it.
Plans, the exact search, the solvers' coefficients and the other policies are all priced here and nowhere else.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from funcpipe.core import PlatformSpec, ScheduleKind, Streams, Sync, usual_streams
from funcpipe.partitioner.cost.sync_forms import all_reduce_s, exposed_s, requests_each
from funcpipe.partitioner.cost.ties import Ties
from funcpipe.scheduler.schedules import in_flight

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTraffic:
    """What stages write (`out`) and read (`in`) for one micro-batch: 32-bit bytes, and storage objects."""

    forward_out_bytes: Array
    forward_out_objects: Array
    forward_in_bytes: Array
    forward_in_objects: Array
    backward_out_bytes: Array
    backward_out_objects: Array
    backward_in_bytes: Array
    backward_in_objects: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """What stages compute and hold, and the functions they run on; seconds, bytes and dollars as named.

    `layer_parameter_bytes` is the sum over layers, in which `ties` occur more than once. `input_bytes` is all that a
    stage keeps of a micro-batch under recomputation: what it reads of other stages and of the model's inputs;
    `held_input_bytes` is what it keeps of that without recomputation besides `activation_bytes`; `workspace_bytes` is
    what its hungriest layer has in use beyond all that while it runs.
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
    recompute: npt.NDArray[np.bool_]
    traffic: StageTraffic
    upload_bytes_s: Array
    download_bytes_s: Array
    price_usd_s: Array

    @property
    def parameter_bytes(self) -> Array:
        """Distinct trainable parameters."""
        return self.layer_parameter_bytes - self.ties.repeated_bytes

    @property
    def summed_bytes(self) -> Array:
        """Of those, the ones whose gradient the replicas of the stage sum."""
        return self.parameter_bytes - self.ties.borrowed_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What holds for all stages of a plan. `micro_batches` counts those of all replicas together.

    `values_per_parameter` is what each function keeps for the optimiser. `gradient_wire_ratio` is the wire ratio of the
    gradients that stages return, where it is not that of activations. Where the optimiser is `sharded` over replicas,
    no stage may have parameters of another one.
    """

    micro_batches: int
    replicas: int
    values_per_parameter: float
    sync: Sync
    wire_ratio: float
    base_bytes: int
    spec: PlatformSpec
    schedule: ScheduleKind = ScheduleKind.GPIPE
    gradient_wire_ratio: float | None = None
    streams: Streams | None = None
    sharded: bool = False

    @property
    def micro_batches_each(self) -> int:
        """Micro-batches that each replica works through."""
        return self.micro_batches // self.replicas

    def held_micro_batches(self, stages: int) -> Array:
        """How many micro-batches' activations each of so many stages holds at once.

        It follows from how many stages lie behind a stage, whatever lies in front.
        """
        each = self.micro_batches_each
        held = [in_flight(self.schedule, stage=i, stages=stages, micro_batches=each) for i in range(stages)]
        return np.array(held, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Seconds that one micro-batch takes on each lane of each stage."""

    forward_s: Array
    forward_upload_s: Array
    forward_download_s: Array
    backward_s: Array
    backward_upload_s: Array
    backward_download_s: Array

    @property
    def forward_sum_s(self) -> Array:
        """Of the forward pass, all lanes one after the other."""
        return self.forward_s + self.forward_upload_s + self.forward_download_s

    @property
    def backward_sum_s(self) -> Array:
        """Of the backward pass, all lanes one after the other."""
        return self.backward_s + self.backward_upload_s + self.backward_download_s

    @property
    def round_s(self) -> Array:
        """From the start of a forward to the end of its backward, without what happens at later stages."""
        return self.forward_s + self.forward_upload_s + self.backward_download_s + self.backward_s

    def slowest(self, schedule: ScheduleKind) -> tuple[Array, Array]:
        """The slowest lane, of the forward and of the backward pass.

        Where a stage runs forwards and backwards in turn it is the slowest lane of both together, and counts forward.
        """
        upload_s, download_s = self.forward_upload_s, self.forward_download_s
        if schedule is ScheduleKind.GPIPE:
            backward_lanes = np.maximum(self.backward_upload_s, self.backward_download_s)
            forward_lane_s = np.maximum(np.maximum(self.forward_s, upload_s), download_s)
            return forward_lane_s, np.maximum(self.backward_s, backward_lanes)
        compute_s = self.forward_s + self.backward_s
        links_s = np.maximum(upload_s + self.backward_upload_s, download_s + self.backward_download_s)
        return np.maximum(compute_s, links_s), np.zeros_like(compute_s)


def shared_link(loads: Loads, setting: Setting, workers: int) -> tuple[Array, Array]:
    """Bytes per second up and down that each of `workers` functions gets, all of them transferring at once.

    The platform's cap, where it has one, holds for each direction and is shared evenly.
    """
    cap = setting.spec.shared_bytes_s
    share = np.inf if cap is None else cap / workers
    return np.minimum(loads.upload_bytes_s, share), np.minimum(loads.download_bytes_s, share)


def lane_times(loads: Loads, setting: Setting, *, workers: int) -> Lanes:
    """Seconds of one micro-batch on each lane; `workers` functions share the platform's links."""
    up, down = shared_link(loads, setting, workers)
    ratio, latency_s, traffic = setting.wire_ratio, setting.spec.latency_s, loads.traffic
    ratio_back = ratio if setting.gradient_wire_ratio is None else setting.gradient_wire_ratio
    forward_s = setting.spec.contention * loads.forward_s
    backward_s = setting.spec.contention * loads.backward_s
    return Lanes(
        forward_s=forward_s,
        forward_upload_s=ratio * traffic.forward_out_bytes / up + latency_s * traffic.forward_out_objects,
        forward_download_s=ratio * traffic.forward_in_bytes / down + latency_s * traffic.forward_in_objects,
        backward_s=backward_s + np.where(loads.recompute, forward_s, 0.0),
        backward_upload_s=ratio_back * traffic.backward_out_bytes / up + latency_s * traffic.backward_out_objects,
        backward_download_s=ratio_back * traffic.backward_in_bytes / down + latency_s * traffic.backward_in_objects,
    )


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
) -> Array:
    """Seconds in which `replicas` functions sum `gradient_bytes` each through storage, after their last backward.

    Rounds travel while that backward of `backward_s` still runs.

    Three-phase (LambdaML): the foreign splits up, one's own split of the others down, the merged split up and the
    others' down, one after the other. Pipelined (FuncPipe): the first two overlap, step by step. For equal links w the
    two are 3s/w − 2s/(nw) + 4 latencies and 2s/w + (2 + n) latencies (FuncPipe, section 3.3).
    """
    split_bytes = np.asarray(gradient_bytes, dtype=np.float64) / replicas
    up_s, down_s = split_bytes / upload_bytes_s, split_bytes / download_bytes_s
    if replicas == 1:
        return np.zeros_like(up_s)
    spread_s: Array = up_s + (replicas - 1) * down_s
    link = (gradient_bytes, replicas, upload_bytes_s, download_bytes_s, latency_s)
    match sync:
        case Sync.THREE_PHASE:
            return (replicas - 1) * (up_s + down_s) + spread_s + 4 * latency_s
        case Sync.ALL_REDUCE:
            return all_reduce_s(*link)
        case Sync.EXCHANGE | Sync.STREAMED:
            return exposed_s(sync, *link, usual_streams(sync, replicas, streams), backward_s)
    reduce_s: Array = up_s + (replicas - 2) * np.maximum(up_s, down_s) + down_s
    return reduce_s + spread_s + (2 + replicas) * latency_s


def sync_times(loads: Loads, setting: Setting, *, workers: int) -> Array:
    """Seconds in which each stage's replicas sum their gradients, and in which it sends and reads those of tied
    parameters, one after the other, from its last backward on; `workers` functions share the platform's links.

    Where stages share parameters, nothing travels before that backward has ended.
    """
    up, down = shared_link(loads, setting, workers)
    ties = loads.ties
    tied_s = ties.upload_bytes / up + ties.download_bytes / down
    tied_s = tied_s + setting.spec.latency_s * (ties.upload_objects + ties.download_objects)
    backward_s = np.where(ties.download_objects > 0, 0.0, setting.spec.contention * loads.backward_s)
    return tied_s + sync_time_s(
        setting.sync,
        gradient_bytes=loads.summed_bytes,
        replicas=setting.replicas,
        upload_bytes_s=up,
        download_bytes_s=down,
        latency_s=setting.spec.latency_s,
        streams=setting.streams,
        backward_s=backward_s,
    )


def requests(loads: Loads, setting: Setting) -> tuple[Array, Array]:
    """Puts and gets of each stage in one iteration, all replicas together."""
    replicas, traffic, ties = setting.replicas, loads.traffic, loads.ties
    sync_puts, sync_gets = requests_each(setting.sync, replicas, usual_streams(setting.sync, replicas, setting.streams))
    puts = setting.micro_batches * (traffic.forward_out_objects + traffic.backward_out_objects)
    puts = puts + round(replicas * sync_puts) + replicas * ties.upload_objects
    gets = setting.micro_batches * (traffic.forward_in_objects + traffic.backward_in_objects)
    gets = gets + round(replicas * sync_gets) + replicas * ties.download_objects
    return puts, gets


def request_usd(puts: Array, gets: Array, spec: PlatformSpec) -> Array:
    """Dollars for storage requests."""
    return puts * spec.price_put_usd + gets * spec.price_get_usd


def compute_work_s(lanes: Lanes, setting: Setting) -> Array:
    """Seconds of one processor that each stage computes in one iteration, all replicas together."""
    return setting.micro_batches * (lanes.forward_s + lanes.backward_s)


def iteration_time_s(lanes: Lanes, sync_s: Array, setting: Setting) -> Array:
    """Seconds of one iteration; the last axis runs along the stages of a plan and vanishes.

    GPipe: the forward pass fills the pipeline once and then follows its slowest lane; so does the backward pass, whose
    stages synchronise as soon as their own last backward is done (FuncPipe, section 3.2).

    Forwards and backwards in turn: one micro-batch goes there and back, the others follow at the pace of the slowest
    stage. Its lanes serve both passes (PipeDream-Flush, Narayanan et al., ICML 2021: (m + stages − 1)(F + B) without
    transfers); and a stage that may hold h micro-batches, fewer than there are, begins no more than h in the time that
    one takes from its forward there to its backward, which all transfers behind it prolong (Little's law). The pace is
    taken to be even: with unequal stages, iterations are a little shorter, or where a slow link lies between fast ones
    longer, than this says.

    Where all functions share a few processors, no iteration is shorter than its computation spread over all of them.
    """
    repeats = setting.micro_batches_each - 1
    forward_lane_s, backward_lane_s = lanes.slowest(setting.schedule)
    backwards = _from_each_on(lanes.backward_sum_s)
    rounds_s = _from_each_on(lanes.forward_sum_s) + backwards - lanes.forward_download_s - lanes.backward_upload_s
    pace_s = np.maximum(forward_lane_s, rounds_s * round_shares(setting, rounds_s.shape[-1]))
    forward_s = lanes.forward_sum_s.sum(-1) + repeats * pace_s.max(-1)
    slowest = np.maximum.accumulate(backward_lane_s[..., ::-1], axis=-1)[..., ::-1]
    total_s: Array = forward_s + (backwards + repeats * slowest + sync_s).max(-1)
    if setting.spec.shared_cores is not None:
        work_s = compute_work_s(lanes, setting).sum(-1)
        total_s = np.maximum(total_s, work_s / setting.spec.shared_cores)
    return total_s


def round_shares(setting: Setting, stages: int) -> Array:
    """For each of so many stages the least part of a micro-batch's way there and back in which the next one can begin.

    0 where a stage may hold all micro-batches: none waits for another one's backward.
    """
    held = setting.held_micro_batches(stages)
    return np.where(held < setting.micro_batches_each, 1 / held, 0.0)


def _from_each_on(seconds: Array) -> Array:
    """The sums over each stage and all behind it."""
    sums: Array = seconds[..., ::-1].cumsum(-1)[..., ::-1]
    return sums
