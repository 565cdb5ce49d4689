"""Workloads of each way's model, from a profile and a market. Values that are not measured are marked assumptions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from funcpipe.core.choices import OptimizerKind
from funcpipe.core.market import Machine, Market
from funcpipe.core.platform import MB, FunctionSize, PlatformSpec
from funcpipe.core.profile import ModelProfile
from funcpipe.core.provision import JobSpec
from funcpipe.errors import Infeasible
from funcpipe.neighbours.provisioning.cynthia import ClusterWorkload, ServerType, WorkerType
from funcpipe.neighbours.provisioning.goal import loss_rate_s
from funcpipe.neighbours.provisioning.lambdadnn import FunctionMarket, FunctionWorkload
from funcpipe.neighbours.provisioning.spotdnn import SpotSystem, SpotType
from funcpipe.partitioner.cost.formulas import waste_bytes

ASSUMPTIONS = (
    "machines without GPUs compute like functions, in proportion to their vCPUs",
    "a GPU computes at 0.9 and moves bytes at 0.5 of its published rates; where these or the work of layers are not "
    "known, it computes like so many vCPUs as the market says (vcpu_equivalents)",
    "spotDNN's contention coefficients are those of its released ResNet-110 (0.8, -1.92), not measured here",
    "a parameter server spends one vCPU on 1,000 MB/s",
    "an asynchronous worker's batch is the power of two that its memory holds, at most the global batch",
    "samples are loaded while others are computed, and take no time of their own",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWorkload:
    """A model on one worker that holds all of it.

    It needs `fixed_mb` of memory (MB of 2^20 bytes), and `sample_memory_mb` for each sample that it holds at once.
    """

    vcpu_s_per_sample: float
    model_mb: float
    fixed_mb: float
    sample_memory_mb: float
    micro_batch: int

    @property
    def memory_mb(self) -> float:
        """The memory for training with one micro-batch at a time, in MB."""
        return self.fixed_mb + self.micro_batch * self.sample_memory_mb

    def batch_in(self, memory_mb: float) -> int:
        """The largest power of two of samples that fits, as in equation (10) of spotDNN; at least a micro-batch."""
        fits = (memory_mb - self.fixed_mb) / max(self.sample_memory_mb, 1e-9)
        return max(self.micro_batch, 1 << math.floor(math.log2(max(fits, 1.0))))


def model_workload(profile: ModelProfile, spec: PlatformSpec, optimizer: OptimizerKind) -> ModelWorkload:
    """The workload of training the whole model; the rate is that of the largest size, by its vCPUs.

    Of functions that all have GPUs it is that of the largest GPU, by the vCPUs that are as fast.
    """
    vcpu = {size: size.vcpu for size in _processor_sizes(profile, spec)}
    vcpu = vcpu or {one: one.accelerator.vcpu_equivalents for one in _measured_sizes(profile, spec) if one.accelerator}
    size = max(vcpu, key=lambda one: vcpu[one])
    column = profile.sizes.index(size.name)
    seconds = sum(layer.forward_s[column] + layer.backward_s[column] for layer in profile.layers)
    layers, data = profile.layers, profile.data
    parameter_bytes = profile.parameter_bytes(0, len(layers))
    activation_bytes = sum(layer.activation_bytes for layer in layers) + max(layer.workspace_bytes for layer in layers)
    fixed_bytes = (2 + optimizer.values_per_parameter) * parameter_bytes
    fixed_bytes += profile.base_memory_bytes + sum(layer.constant_bytes for layer in layers)
    fixed_bytes += data.resident_bytes if data else 0
    return ModelWorkload(
        vcpu_s_per_sample=seconds * vcpu[size] / profile.micro_batch,
        model_mb=parameter_bytes / 1e6,
        fixed_mb=fixed_bytes / MB,
        sample_memory_mb=(activation_bytes + waste_bytes(activation_bytes)) / MB / profile.micro_batch,
        micro_batch=profile.micro_batch,
    )


def at_roofline(market: Market, profile: ModelProfile, spec: PlatformSpec) -> Market:
    """Return `market` with GPUs that train the model of `profile` as fast as their published rates allow."""
    if profile.work is None:
        return market
    vcpu_s = model_workload(profile, spec, OptimizerKind.SGD).vcpu_s_per_sample * profile.micro_batch
    times = [gpu.seconds(profile.work, profile.precision) for gpu in market.gpus]
    gpus = [
        gpu if time_s is None else replace(gpu, vcpu_equivalents=vcpu_s / time_s)
        for gpu, time_s in zip(market.gpus, times, strict=True)
    ]
    return replace(market, gpus=tuple(gpus))


def function_workload(work: ModelWorkload, profile: ModelProfile, spec: PlatformSpec, job: JobSpec) -> FunctionWorkload:
    """λDNN's view: rates linear in memory, fitted over the sizes (its section on profiling).

    A function's local batch is all of the global batch, in micro-batches one after another: so every number of
    functions makes the same updates. The paper's smaller batches for few functions would train differently. Raises
    Infeasible where all functions have GPUs.
    """
    sizes = _processor_sizes(profile, spec)
    if not sizes:
        raise Infeasible(f"the functions of {spec.name} have GPUs: their rates are not linear in their memory")
    memory = [size.memory_mb for size in sizes]
    rates = [size.vcpu / work.vcpu_s_per_sample for size in sizes]
    stores = [size.download_bytes_s / 1e6 for size in sizes]
    rate_slope, rate_base = _line(memory, rates)
    flat = [size.memory_mb for size in sizes if size.download_bytes_s == max(one.download_bytes_s for one in sizes)]
    rising = [(m, s) for m, s in zip(memory, stores, strict=True) if m <= flat[0]]
    store_slope, store_base = _line([m for m, _ in rising], [s for _, s in rising])
    return FunctionWorkload(
        dataset_mb=0.0,  # in every way samples are loaded while others are computed
        model_mb=work.model_mb,
        local_batch=job.global_batch,
        global_batch=job.global_batch,
        rate_slope=rate_slope,
        rate_base=rate_base,
        store_slope=store_slope,
        store_base=store_base,
        store_flat_mb=flat[0],
        memory_min_mb=max(math.ceil(work.memory_mb / 64) * 64, sizes[0].memory_mb),
    )


def function_market(spec: PlatformSpec, market: Market) -> FunctionMarket:
    """λDNN's view of a platform's functions without GPUs, with a parameter server of the market."""
    largest = [size for size in spec.sizes if size.accelerator is None][-1]
    server = market.machine(market.server)
    return FunctionMarket(
        server_mb_s=server.network_mb_s,
        function_mb_s=min(largest.upload_bytes_s, largest.download_bytes_s) / 1e6,
        store_mb_s=largest.download_bytes_s / 1e6,
        memory_max_mb=largest.memory_mb,
        memory_step_mb=64,
        usd_gb_s=largest.price_usd_s / (largest.memory_mb / 1024),
        server_usd_s=server.on_demand_usd_h / 3600,
        max_functions=spec.max_functions,
        start_s=max(market.start_s, spec.cold_start_s),
        lifetime_s=spec.lifetime_s,
        function=spec.name,
        server=server.name,
    )


def exchange_s(machine: Machine, work: ModelWorkload) -> float:
    """Seconds in which the GPUs of a machine exchange their gradients, by the second term of spotDNN's equation (7)."""
    return 2 * machine.gpus * work.model_mb / machine.pcie_mb_s if machine.gpus > 1 else 0.0


def on_this_machine(
    profile: ModelProfile, spec: PlatformSpec, local: PlatformSpec
) -> tuple[ModelProfile, PlatformSpec]:
    """Return `profile`, which is for `spec`, for the functions of this machine, with what `local` has of them.

    Their processors compute as those of the largest size of `spec`, and GPUs by their published rates. Raises
    Infeasible where neither is known.
    """
    measured = _processor_sizes(profile, spec)
    known = profile.work is not None
    sizes = tuple(size for size in local.sizes if (known if size.accelerator is not None else measured))
    if not sizes:
        raise Infeasible(
            "here: the profile has no seconds of processors, and this machine no GPU whose rates are known; measure "
            "the model here (funcpipe profile --platform local)"
        )
    plain = [size for size in sizes if size.accelerator is None]
    if plain:
        largest = max(measured, key=lambda size: size.vcpu)
        column = profile.sizes.index(largest.name)

        def scaled(seconds: Sequence[float]) -> tuple[float, ...]:
            return tuple(seconds[column] * largest.vcpu / size.vcpu for size in plain)

        layers = tuple(
            replace(layer, forward_s=scaled(layer.forward_s), backward_s=scaled(layer.backward_s))
            for layer in profile.layers
        )
        profile = replace(profile, sizes=tuple(size.name for size in plain), layers=layers)
    return profile.on_sizes(local.name, sizes), replace(local, sizes=sizes)


def cluster_workload(work: ModelWorkload, job: JobSpec) -> ClusterWorkload:
    """Cynthia's view: one iteration of the global batch."""
    return ClusterWorkload(iteration_vcpu_s=work.vcpu_s_per_sample * job.global_batch, model_mb=work.model_mb)


def worker_types(work: ModelWorkload, market: Market) -> tuple[WorkerType, ...]:
    """The machines that hold the model, on demand."""
    return tuple(
        WorkerType(
            name=machine.name,
            rate_vcpu=market.compute_vcpu(machine),
            network_mb_s=machine.network_mb_s,
            usd_h=machine.on_demand_usd_h,
            quota=machine.quota,
            exchange_s=exchange_s(machine, work),
        )
        for machine in market.machines
        if market.model_memory_mb(machine) >= work.memory_mb
    )


def server_type(market: Market) -> ServerType:
    """The market's machine for a parameter server."""
    server = market.machine(market.server)
    return ServerType(
        name=server.name,
        vcpu=server.vcpu,
        network_mb_s=server.network_mb_s,
        usd_h=server.on_demand_usd_h,
        quota=max(server.quota, 1),
    )


def spot_types(work: ModelWorkload, market: Market, job: JobSpec) -> tuple[SpotType, ...]:
    """The machines with a spot price that hold the model."""
    found = []
    for machine in market.machines:
        if machine.spot_usd_h is None or not machine.quota or market.model_memory_mb(machine) < work.memory_mb:
            continue
        batch = min(max(machine.gpus, 1) * work.batch_in(market.model_memory_mb(machine)), job.global_batch)
        found.append(
            SpotType(
                name=machine.name,
                batch=batch,
                compute_s=batch * work.vcpu_s_per_sample / market.compute_vcpu(machine),
                gpus=machine.gpus,
                usd_h=machine.spot_usd_h,
                quota=machine.quota,
                losses_s=loss_rate_s(machine),
            )
        )
    return tuple(found)


def spot_system(work: ModelWorkload, market: Market, types: Sequence[SpotType], *, count_server: bool) -> SpotSystem:
    """spotDNN's view of the network; a worker asks for what the slowest of the machines can move."""
    server = market.machine(market.server)
    networks = [market.machine(kind.name).network_mb_s for kind in types]
    return SpotSystem(
        model_mb=work.model_mb,
        request_mb_s=min([*networks, server.network_mb_s]),
        server_mb_s=server.network_mb_s,
        pcie_mb_s=min((market.machine(kind.name).pcie_mb_s for kind in types), default=10_000.0),
        server=server.name,
        server_usd_h=server.on_demand_usd_h,
        count_server=count_server,
        start_s=market.start_s,
    )


def _measured_sizes(profile: ModelProfile, spec: PlatformSpec) -> list[FunctionSize]:
    return [size for size in spec.sizes if size.name in profile.sizes]


def _processor_sizes(profile: ModelProfile, spec: PlatformSpec) -> list[FunctionSize]:
    return [size for size in _measured_sizes(profile, spec) if size.accelerator is None]


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line; a constant if there is only one point."""
    if len(set(x)) < 2:
        return 0.0, float(np.mean(y))
    slope, base = np.polyfit(x, y, 1)
    return float(slope), float(base)
