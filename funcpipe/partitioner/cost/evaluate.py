"""The estimate of one plan: seconds, dollars by item, bytes of memory, requests, and the lane that is busy longest."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from funcpipe.core import (
    MB,
    DeviceMemory,
    Estimate,
    FunctionSize,
    ModelProfile,
    Plan,
    PlatformSpec,
    Stage,
    StageEstimate,
    find_routes,
    stages_of_layers,
)
from funcpipe.errors import PlanError
from funcpipe.partitioner.cost import Array, IntArray
from funcpipe.partitioner.cost.backward_peaks import backward_peaks, most_workspace_bytes
from funcpipe.partitioner.cost.formulas import Lanes, MemoryUse, lane_times, memory_use, parameter_copies, stage_costs
from funcpipe.partitioner.cost.loads import Loads, Setting, StageTraffic, functions_of, meeting_share, stage_ties
from funcpipe.partitioner.cost.pipeline import dollars, plan_costs
from funcpipe.partitioner.cost.stores import objects_fit, requests, store_estimates, way_fits
from funcpipe.partitioner.cost.sync_ways import sync_times

_HAND_OVER_REQUESTS = 11
"""One after the other: the state, its manifest and two documents are written; then document, lease, checkpoints and
state are read.
"""

_HAND_OVER_S = 0.3
"""For the successor's polling (every 0.2 s), checksums and threads; `experiments.paper.hand_over` measures it."""


def evaluate(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> Estimate:
    """Predict what one iteration of `plan` takes on `spec`.

    Raises PlanError when the plan does not cover the profile's layers, or uses a function size that the platform does
    not offer or the profile was not measured on. A stage that does not fit its function is priced too: see
    `check_memory`.
    """
    setting, loads = plan_setting(plan, profile, spec), plan_loads(plan, profile, spec)
    lanes, sync_s = lane_times(loads, setting, workers=plan.workers), _sync_seconds(plan, loads, setting)
    meeting_s = None
    if setting.alone:
        meeting = replace(setting, meeting_share=1.0)
        met = stage_costs(loads, lanes, _sync_seconds(plan, loads, meeting), meeting, plan.ways)
        met = met._replace(share=meeting.round_shares(len(plan.stages)))
        meeting_s = plan_costs(met, meeting).iteration_s.item()
    load_s = loads.loads_data * (0.0 if profile.data is None else profile.data.load_s)
    memory = memory_use(loads, setting, setting.held_micro_batches(len(plan.stages)))
    stages = stage_costs(loads, lanes, sync_s, setting, plan.ways)
    whole = plan_costs(stages._replace(share=setting.round_shares(len(plan.stages))), setting)
    iteration_s, usd_s, requests_usd = whole.iteration_s.item(), whole.price_usd_s.item(), whole.request_usd.item()
    puts, gets = requests(loads, setting, plan.ways)
    hours_usd = dollars(setting.stores_usd_s, iteration_s, 0.0)
    hand_over_s, start_usd, steps = _function_life(loads, setting, iteration_s)
    return Estimate(
        iteration_s=iteration_s,
        cost_usd=dollars(usd_s, iteration_s, requests_usd),
        compute_usd=dollars(usd_s, iteration_s, 0.0) - hours_usd,
        request_usd=requests_usd,
        peak_memory_bytes=int(memory.total_bytes.max()),
        puts=round(puts.sum()),
        gets=round(gets.sum()),
        bottleneck=_bottleneck(lanes, sync_s, loads, setting),
        stages=_stage_estimates(lanes, sync_s, memory, load_s, loads),
        overhead_s=hand_over_s / steps,
        overhead_usd=dollars(usd_s, hand_over_s, start_usd) / steps,
        hours_usd=hours_usd,
        stores=store_estimates(loads, setting, iteration_s, plan.ways),
        meeting_s=meeting_s,
        by_rates=profile.estimated and bool(loads.on_device.any()),
    )


def _sync_seconds(plan: Plan, loads: Loads, setting: Setting) -> Array:
    """How long each stage synchronises in its own way."""
    seconds = np.zeros(len(plan.stages))
    for way in set(plan.ways):
        chosen = np.array([other == way for other in plan.ways])
        seconds = np.where(chosen, sync_times(loads, setting, workers=plan.workers, way=way), seconds)
    return seconds


def check_memory(plan: Plan, estimate: Estimate) -> None:
    """Raise PlanError if a stage needs more memory than its function, or the accelerator of that, has."""
    for i, (stage, needs) in enumerate(zip(plan.stages, estimate.stages, strict=True)):
        if not needs.lacks_bytes(stage.memory_mb):
            continue
        needs_mb, device = needs.memory_bytes / MB, needs.device
        data = f", {needs.data_bytes / MB:.0f} of them for data" if needs.data_bytes else ""
        what = f"{needs_mb:.0f} MB{data}, its function has {stage.memory_mb}"
        if device is not None and needs_mb <= stage.memory_mb:
            what = f"{device.needs_bytes / MB:.0f} MB on the GPU, which has {device.has_bytes / MB:.0f}"
        raise PlanError(f"stage {i} needs {what}; choose a larger function, cut the stage, or let it recompute")


def check_objects(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> None:
    """Raise PlanError if a stage writes an object that is too large for its store."""
    setting, loads = plan_setting(plan, profile, spec), plan_loads(plan, profile, spec)
    too_large = ~objects_fit(loads, setting)
    too_large |= [not way_fits(way, loads, setting)[i] for i, way in enumerate(plan.ways)]
    if too_large.any():
        raise PlanError(
            f"stage {int(too_large.argmax())} writes an object that is too large for {plan.stores.messages!r}, which "
            f"holds its messages, or {plan.stores.sums!r}, which holds its sums; choose another store, or more objects"
        )


def plan_setting(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> Setting:
    """The setting of all stages of `plan`."""
    return Setting(
        micro_batches=plan.micro_batches,
        replicas=plan.replicas,
        values_per_parameter=plan.values_per_parameter,
        sync=plan.sync,
        wire_ratio=plan.wire.ratio,
        gradient_wire_ratio=plan.gradient_wire.ratio,
        sync_wire_ratio=plan.wire_sync.ratio,
        base_bytes=profile.base_memory_bytes,
        spec=spec,
        streams=plan.streams,
        schedule=plan.schedule,
        sharded=plan.is_sharded,
        data=profile.data,
        stores=plan.stores,
        joint_bytes=profile.joint_bytes if plan.joint_loss else None,
        alone=plan.trains_locally,
        meeting_share=meeting_share(plan.sync_every, plan.replicas, plan.sync_fragments),
        fragments=plan.sync_fragments if plan.trains_locally else 1,
        codec=spec.codecs.get(plan.wire_sync.value),
        delay=plan.sync_delay if plan.trains_locally else 0,
    )


def plan_loads(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> Loads:
    """The loads of the stages of `plan`. Raises PlanError as `evaluate` does."""
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
        workspace_bytes=most_workspace_bytes(*_borders(plan.stages), profile),
        device_activation_bytes=_stage_sums(plan.stages, [layer.kept_on_device_bytes for layer in profile.layers]),
        peaks=backward_peaks(*_borders(plan.stages), profile),
        **loading_of(*_borders(plan.stages), profile),
        is_last=(np.arange(len(plan.stages)) == len(plan.stages) - 1).astype(np.float64),
        recompute=np.array([stage.recompute for stage in plan.stages]),
        traffic=traffic,
        **functions_of(sizes),
    )


def loading_of(first: IntArray, stop: IntArray, profile: ModelProfile) -> dict[str, Array]:
    """The fields of `Loads` for data: which stages [first, stop) load any, and what they keep of a micro-batch."""
    stages = list(zip(first.tolist(), stop.tolist(), strict=True))
    return {
        "loads_data": np.array([profile.loads_data(*stage) for stage in stages], dtype=np.float64),
        "loaded_bytes": np.array([profile.loaded_bytes(*stage) for stage in stages], dtype=np.float64),
    }


def held_inputs_bytes(first: IntArray, stop: IntArray, profile: ModelProfile) -> Array:
    """Bytes of received tensors that stages [first, stop) hold from forward to backward: an element each.

    A tensor whose first saver is a layer of the stage is left out: it counts with that layer's activations.
    """
    total = np.zeros(len(first))
    for tensor in profile.tensors:
        read = np.searchsorted(tensor.consumers, stop) > np.searchsorted(tensor.consumers, first)
        saver = tensor.saved_by[0] if tensor.saved_by else -1
        counted = (first <= saver) & (saver < stop)
        total += np.where((tensor.producer < first) & read & ~counted, tensor.forward_bytes, 0)
    return total


def plan_traffic(stages: Sequence[Stage], profile: ModelProfile) -> StageTraffic:
    """The traffic of each stage for one micro-batch, from the routes of the profile's tensors."""
    routes = find_routes(stages_of_layers((stage.first, stage.stop) for stage in stages), profile.tensors)
    traffic = StageTraffic.none(len(stages))
    for route in routes.activations:
        traffic.forward_out_bytes[route.producer] += route.payload_bytes
        traffic.forward_out_objects[route.producer] += 1
        for consumer in route.consumers:
            traffic.forward_in_bytes[consumer] += route.payload_bytes
            traffic.forward_in_objects[consumer] += 1
    for gradient in routes.gradients:
        traffic.backward_out_bytes[gradient.consumer] += gradient.payload_bytes
        traffic.backward_out_objects[gradient.consumer] += 1
        traffic.backward_in_bytes[gradient.producer] += gradient.payload_bytes
        traffic.backward_in_objects[gradient.producer] += 1
    return traffic


def size_of(name: str, spec: PlatformSpec) -> FunctionSize:
    """The platform's function size of that name; raises PlanError."""
    for size in spec.sizes:
        if size.name == name:
            return size
    raise PlanError(f"the platform {spec.name} has no size {name!r}; it has {', '.join(s.name for s in spec.sizes)}")


def column_of(size: str, profile: ModelProfile) -> int:
    """The position of the function size `size` in the profile's lists of seconds; raises PlanError."""
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


def _function_life(loads: Loads, setting: Setting, iteration_s: float) -> tuple[float, float, float]:
    """The cost of all functions besides iterations: seconds to hand over, and dollars to start them.

    The third value is how many iterations fit into a life, infinite where functions live without limit. In a hand-over
    all functions wait until the slowest stage has written its parameters and optimiser state, and until its successor,
    which is already running and has read what never changes, has read them.
    """
    spec = setting.spec
    if spec.lifetime_s is None:
        return 0.0, 0.0, math.inf
    gradients = 1  # a copy that is not handed over
    state_bytes = (parameter_copies(setting) - gradients) * loads.parameter_bytes
    moved_s = state_bytes / loads.upload_bytes_s + state_bytes / loads.download_bytes_s
    hand_over_s = hand_over_time_s(float(moved_s.max()), spec.latency_s)
    one_usd = spec.price_invocation_usd + spec.price_put_usd + spec.price_get_usd
    start_s = spec.cold_start_s + float((loads.constant_bytes / loads.download_bytes_s).max())
    start_usd = setting.replicas * (len(moved_s) * one_usd + float(loads.price_usd_s.sum()) * start_s)
    steps = max(1.0, (spec.lifetime_s - start_s - hand_over_s) // iteration_s) if iteration_s else math.inf
    return hand_over_s, start_usd, steps


def hand_over_time_s(moved_s: float, latency_s: float) -> float:
    """Seconds from the last task of a function to the first of its successor, when moving its state takes `moved_s`."""
    return moved_s + _HAND_OVER_REQUESTS * latency_s + _HAND_OVER_S


def _borders(stages: Sequence[Stage]) -> tuple[IntArray, IntArray]:
    return np.array([stage.first for stage in stages]), np.array([stage.stop for stage in stages])


def _bottleneck(lanes: Lanes, sync_s: Array, loads: Loads, setting: Setting) -> str:
    """The lane that is busy longest in an iteration, for example 'stage 1 compute'."""
    each = setting.micro_batches_each
    busy_s = {
        "compute": each * (lanes.forward_s + lanes.backward_s),
        "upload": each * (lanes.forward_upload_s + lanes.backward_upload_s),
        "download": each * (lanes.forward_download_s + lanes.backward_download_s),
        "copying to the host": each * (lanes.forward_to_host_s + lanes.backward_to_host_s),
        "copying to the GPU": each * (lanes.forward_to_device_s + lanes.backward_to_device_s),
        "synchronisation": sync_s,
        "exchange of outputs": lanes.joint_s,
        "load": setting.loading_s * loads.loads_data,
    }
    what = max(busy_s, key=lambda name: float(busy_s[name].max()))
    return f"stage {int(busy_s[what].argmax())} {what}"


def _device_memory(memory: MemoryUse, loads: Loads, number: int) -> DeviceMemory | None:
    if memory.device is None or not loads.on_device[number]:
        return None
    use = memory.device
    return DeviceMemory(
        has_bytes=int(loads.device_memory_bytes[number]),
        context_bytes=int(use.base_bytes[number]),
        state_bytes=int(use.state_bytes[number]),
        activation_bytes=int(use.activation_bytes[number]),
        waste_bytes=int(use.waste_bytes[number]),
    )


def _stage_estimates(
    lanes: Lanes, sync_s: Array, memory: MemoryUse, load_s: Array, loads: Loads
) -> tuple[StageEstimate, ...]:
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
            joint_s=float(lanes.joint_s[i]),
            load_s=float(load_s[i]),
            data_bytes=int(memory.data_bytes[i]),
            device=_device_memory(memory, loads, i),
            forward_to_host_s=float(lanes.forward_to_host_s[i]),
            forward_to_device_s=float(lanes.forward_to_device_s[i]),
            backward_to_host_s=float(lanes.backward_to_host_s[i]),
            backward_to_device_s=float(lanes.backward_to_device_s[i]),
        )
        for i in range(len(sync_s))
    )
