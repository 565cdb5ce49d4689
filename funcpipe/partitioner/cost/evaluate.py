"""What a plan takes: seconds, dollars itemised, bytes of memory, requests, and the lane that holds it up."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from funcpipe.core import (
    Estimate,
    FunctionSize,
    ModelProfile,
    Plan,
    PlatformSpec,
    Stage,
    StageEstimate,
    find_routes,
)
from funcpipe.errors import PlanError
from funcpipe.partitioner.cost.formulas import (
    Array,
    Lanes,
    Loads,
    Setting,
    StageTraffic,
    iteration_time_s,
    lane_times,
    request_usd,
    requests,
    sync_times,
)
from funcpipe.partitioner.cost.memory import MemoryUse, memory_use
from funcpipe.partitioner.cost.ties import stage_ties

IntArray = npt.NDArray[np.int64]

_HAND_OVER_REQUESTS = 11
"""One after the other: the state, its manifest, two notes; then the note, the lease, the checkpoints, the state."""

_HAND_OVER_S = 0.3
"""For the successor to look (every 0.2 s), for checksums and threads; `experiments.handover` measures it."""


def evaluate(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> Estimate:
    """What one iteration of `plan` is predicted to take on `spec`.

    Raises PlanError when the plan does not cover the profile's layers, or uses a function size that the platform does
    not sell or the profile was not measured on. A stage that outgrows its function is priced all the same: see
    `check_memory`.
    """
    setting, loads = plan_setting(plan, profile, spec), plan_loads(plan, profile, spec)
    lanes, sync_s = lane_times(loads, setting, workers=plan.workers), sync_times(loads, setting, workers=plan.workers)
    memory = memory_use(loads, setting, setting.held_micro_batches(len(plan.stages)))
    iteration_s = float(iteration_time_s(lanes, sync_s, setting))
    puts, gets = requests(loads, setting)
    compute_usd = plan.replicas * float(loads.price_usd_s.sum()) * iteration_s
    requests_usd = float(request_usd(puts, gets, spec).sum())
    hand_over_s, start_usd, steps = _life(loads, setting, iteration_s)
    return Estimate(
        iteration_s=iteration_s,
        cost_usd=compute_usd + requests_usd,
        compute_usd=compute_usd,
        request_usd=requests_usd,
        peak_memory_bytes=int(memory.total_bytes.max()),
        puts=int(puts.sum()),
        gets=int(gets.sum()),
        bottleneck=_bottleneck(lanes, sync_s, setting),
        stages=_stage_estimates(lanes, sync_s, memory),
        overhead_s=hand_over_s / steps,
        overhead_usd=(start_usd + plan.replicas * float(loads.price_usd_s.sum()) * hand_over_s) / steps,
    )


def check_memory(plan: Plan, estimate: Estimate) -> None:
    """Raise PlanError if a stage needs more memory than its function has."""
    for i, (stage, needs) in enumerate(zip(plan.stages, estimate.stages, strict=True)):
        needs_mb = needs.memory_bytes / 2**20
        if needs_mb > stage.memory_mb:
            raise PlanError(
                f"stage {i} needs {needs_mb:.0f} MB, its function has {stage.memory_mb}; "
                "choose a larger function, cut the stage, or let it recompute"
            )


def plan_setting(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> Setting:
    """What holds for all stages of `plan`."""
    return Setting(
        micro_batches=plan.micro_batches,
        replicas=plan.replicas,
        values_per_parameter=plan.optimizer.values_each(plan.replicas, sharded=plan.is_sharded),
        sync=plan.sync,
        wire_ratio=plan.wire.ratio,
        gradient_wire_ratio=plan.gradient_wire.ratio,
        base_bytes=profile.base_memory_bytes,
        spec=spec,
        streams=plan.streams,
        schedule=plan.schedule,
        sharded=plan.is_sharded,
    )


def plan_loads(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> Loads:
    """What the stages of `plan` compute, hold and send. Raises PlanError as `evaluate` does."""
    if plan.stages[-1].stop != len(profile.layers):
        raise PlanError(f"the plan covers {plan.stages[-1].stop} layers, the profile has {len(profile.layers)}")
    if plan.micro_batch != profile.micro_batch:
        raise PlanError(
            f"the plan's micro-batches hold {plan.micro_batch} samples, "
            f"the profile was measured with {profile.micro_batch}"
        )
    sizes = [size_of(stage.size, spec) for stage in plan.stages]
    traffic = plan_traffic(plan.stages, profile)
    inputs = _stage_sums(plan.stages, [layer.input_bytes for layer in profile.layers])
    return Loads(
        forward_s=_stage_seconds(plan.stages, profile, backward=False),
        backward_s=_stage_seconds(plan.stages, profile, backward=True),
        layer_parameter_bytes=_stage_sums(plan.stages, [layer.parameter_bytes for layer in profile.layers]),
        ties=stage_ties(*_borders(plan.stages), profile),
        constant_bytes=_stage_sums(plan.stages, [layer.constant_bytes for layer in profile.layers]),
        activation_bytes=_stage_sums(plan.stages, [layer.activation_bytes for layer in profile.layers]),
        input_bytes=inputs + traffic.forward_in_bytes,
        held_input_bytes=held_inputs_bytes(*_borders(plan.stages), profile),
        workspace_bytes=_most_workspace_bytes(plan.stages, profile),
        recompute=np.array([stage.recompute for stage in plan.stages]),
        traffic=traffic,
        upload_bytes_s=np.array([size.upload_bytes_s for size in sizes]),
        download_bytes_s=np.array([size.download_bytes_s for size in sizes]),
        price_usd_s=np.array([size.price_usd_s for size in sizes]),
    )


def held_inputs_bytes(first: IntArray, stop: IntArray, profile: ModelProfile) -> Array:
    """What stages [first, stop) hold, from forward to backward, of what they receive: an element each.

    Without the tensors that count with a layer of the stage, as the first that saves them.
    """
    total = np.zeros(len(first))
    for tensor in profile.tensors:
        read = np.searchsorted(tensor.consumers, stop) > np.searchsorted(tensor.consumers, first)
        saver = tensor.saved_by[0] if tensor.saved_by else -1
        counted = (first <= saver) & (saver < stop)
        total += np.where((tensor.producer < first) & read & ~counted, tensor.forward_bytes, 0)
    return total


def plan_traffic(stages: Sequence[Stage], profile: ModelProfile) -> StageTraffic:
    """What each stage writes and reads for one micro-batch, from the routes of the profile's tensors."""
    stage_of_layer = [i for i, stage in enumerate(stages) for _ in range(stage.first, stage.stop)]
    routes = find_routes(stage_of_layer, profile.tensors)
    counts = np.zeros((8, len(stages)))
    for route in routes.activations:
        counts[0:2, route.producer] += route.payload_bytes, 1
        for consumer in route.consumers:
            counts[2:4, consumer] += route.payload_bytes, 1
    for gradient in routes.gradients:
        counts[4:6, gradient.consumer] += gradient.payload_bytes, 1
        counts[6:8, gradient.producer] += gradient.payload_bytes, 1
    return StageTraffic(
        forward_out_bytes=counts[0],
        forward_out_objects=counts[1],
        forward_in_bytes=counts[2],
        forward_in_objects=counts[3],
        backward_out_bytes=counts[4],
        backward_out_objects=counts[5],
        backward_in_bytes=counts[6],
        backward_in_objects=counts[7],
    )


def size_of(name: str, spec: PlatformSpec) -> FunctionSize:
    """The platform's function size of that name; raises PlanError."""
    for size in spec.sizes:
        if size.name == name:
            return size
    raise PlanError(f"the platform {spec.name} has no size {name!r}; it has {', '.join(s.name for s in spec.sizes)}")


def column_of(size: str, profile: ModelProfile) -> int:
    """Where the seconds for the function size `size` stand in the profile; raises PlanError."""
    if size not in profile.sizes:
        measured = ", ".join(profile.sizes)
        raise PlanError(f"the profile of {profile.model} was not measured on {size!r}; it has {measured}")
    return profile.sizes.index(size)


def _stage_seconds(stages: Sequence[Stage], profile: ModelProfile, *, backward: bool) -> Array:
    seconds = []
    for stage in stages:
        column = column_of(stage.size, profile)
        layers = profile.layers[stage.first : stage.stop]
        seconds.append(sum((layer.backward_s if backward else layer.forward_s)[column] for layer in layers))
    return np.array(seconds, dtype=np.float64)


def _stage_sums(stages: Sequence[Stage], values: Sequence[int]) -> Array:
    return np.array([sum(values[stage.first : stage.stop]) for stage in stages], dtype=np.float64)


def _life(loads: Loads, setting: Setting, iteration_s: float) -> tuple[float, float, float]:
    """What a function's life costs besides iterations: seconds to hand over, dollars to start all functions; and how
    many iterations such a life holds.

    All wait while the slowest stage writes its parameters, optimiser state and buffers and its successor, already
    started, reads them. Where functions live for ever the number of iterations is infinite.
    """
    spec = setting.spec
    if spec.lifetime_s is None:
        return 0.0, 0.0, math.inf
    state_bytes = (1 + setting.values_per_parameter) * loads.parameter_bytes + loads.constant_bytes
    moved_s = state_bytes / loads.upload_bytes_s + state_bytes / loads.download_bytes_s
    hand_over_s = hand_over_time_s(float(moved_s.max()), spec.latency_s)
    one_usd = spec.price_invocation_usd + spec.price_put_usd + spec.price_get_usd
    start_usd = setting.replicas * (len(moved_s) * one_usd + float(loads.price_usd_s.sum()) * spec.cold_start_s)
    steps = max(1.0, (spec.lifetime_s - spec.cold_start_s - hand_over_s) // iteration_s) if iteration_s else math.inf
    return hand_over_s, start_usd, steps


def hand_over_time_s(moved_s: float, latency_s: float) -> float:
    """Seconds from the last task of a function to the first of its successor; state moves for `moved_s` of them."""
    return moved_s + _HAND_OVER_REQUESTS * latency_s + _HAND_OVER_S


def _borders(stages: Sequence[Stage]) -> tuple[IntArray, IntArray]:
    return np.array([stage.first for stage in stages]), np.array([stage.stop for stage in stages])


def _most_workspace_bytes(stages: Sequence[Stage], profile: ModelProfile) -> Array:
    workspace = [layer.workspace_bytes for layer in profile.layers]
    return np.array([max(workspace[stage.first : stage.stop]) for stage in stages], dtype=np.float64)


def _bottleneck(lanes: Lanes, sync_s: Array, setting: Setting) -> str:
    """The lane that is busy longest in an iteration, such as 'stage 1 compute'."""
    each = setting.micro_batches_each
    busy_s = {
        "compute": each * (lanes.forward_s + lanes.backward_s),
        "upload": each * (lanes.forward_upload_s + lanes.backward_upload_s),
        "download": each * (lanes.forward_download_s + lanes.backward_download_s),
        "synchronisation": sync_s,
    }
    what = max(busy_s, key=lambda name: float(busy_s[name].max()))
    return f"stage {int(busy_s[what].argmax())} {what}"


def _stage_estimates(lanes: Lanes, sync_s: Array, memory: MemoryUse) -> tuple[StageEstimate, ...]:
    return tuple(
        StageEstimate(
            base_bytes=int(memory.base_bytes[i]),
            state_bytes=int(memory.state_bytes[i]),
            activation_bytes=int(memory.activation_bytes[i]),
            waste_bytes=int(memory.waste_bytes[i]),
            forward_s=float(lanes.forward_s[i]),
            forward_upload_s=float(lanes.forward_upload_s[i]),
            forward_download_s=float(lanes.forward_download_s[i]),
            backward_s=float(lanes.backward_s[i]),
            backward_upload_s=float(lanes.backward_upload_s[i]),
            backward_download_s=float(lanes.backward_download_s[i]),
            sync_s=float(sync_s[i]),
        )
        for i in range(len(sync_s))
    )
