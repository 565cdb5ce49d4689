"""Functions with accelerators: two memories, and seconds by published rates."""

from dataclasses import replace

import numpy as np
import pytest

from funcpipe.comm import weight_files
from funcpipe.core import (
    MB,
    FunctionSize,
    LayerProfile,
    ModelProfile,
    OptimizerKind,
    Plan,
    PlatformSpec,
    Precision,
    Recompute,
    ScheduleKind,
    Stage,
    Sync,
    TensorProfile,
    TrainingSpec,
    Wire,
    from_text,
    to_text,
)
from funcpipe.core.accelerator import Accelerator, Work
from funcpipe.errors import Infeasible, InvalidValue, PlanError
from funcpipe.partitioner.cost import stores
from funcpipe.partitioner.cost.accelerator_memory import PIECES_BYTES
from funcpipe.partitioner.cost.backward_peaks import backward_peaks
from funcpipe.partitioner.cost.evaluate import check_memory, evaluate
from funcpipe.partitioner.cost.formulas import DRIVER_BYTES
from funcpipe.partitioner.explain import explain
from funcpipe.partitioner.explain_text import render
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exact import exact
from funcpipe.partitioner.search.exhaustive import exhaustive
from funcpipe.runstate import checkpoints
from funcpipe.show.plans import plan as described
from tests.partitioner.instances import chain, platform

T4 = Accelerator(
    name="T4", memory_mb=16384, vcpu_equivalents=43.0, fp32_tflop_s=8.1, memory_gb_s=320.0, host_device_gb_s=12.0
)


def gpu_size(name: str, *, memory_mb: int, device_mb: int, bus_gb_s: float = 12.0, **changes: float) -> FunctionSize:
    values = {"vcpu": 4.0, "upload_bytes_s": 6e7, "download_bytes_s": 6e7, "price_usd_s": 1e-4} | changes
    device = replace(T4, memory_mb=device_mb, host_device_gb_s=bus_gb_s)
    return FunctionSize(name=name, memory_mb=memory_mb, accelerator=device, **values)


def gpu_platform(*gpus: FunctionSize, cpus: int = 1) -> PlatformSpec:
    """Of so many sizes without a GPU, and of these."""
    spec = platform(max(cpus, 1))
    sizes = (*spec.sizes[:cpus], *gpus)
    return replace(spec, sizes=tuple(sorted(sizes, key=lambda size: size.memory_mb)))


def two_layers(spec: PlatformSpec, *, sent_bytes: int = 10) -> ModelProfile:
    """By hand: 100 bytes of parameters, 7 of constants and 40 of activations and workspace a layer."""
    work = Work(flop=10**9, dense_bytes=10**6, other_bytes=0)
    layers = tuple(
        LayerProfile(
            name=name,
            parameter_bytes=100,
            constant_bytes=7,
            activation_bytes=30,
            workspace_bytes=10,
            forward_s=(1.0,) * len(spec.sizes),
            backward_s=(2.0,) * len(spec.sizes),
            forward_work=work,
            backward_work=replace(work, flop=2 * 10**9),
        )
        for name in ("a", "b")
    )
    sent = TensorProfile(
        name="t", producer=0, consumers=(1,), forward_bytes=sent_bytes, backward_bytes=sent_bytes, saved_by=(1,)
    )
    return ModelProfile(
        model="two",
        micro_batch=1,
        platform=spec.name,
        sizes=tuple(size.name for size in spec.sizes),
        base_memory_bytes=300,
        layers=layers,
        tensors=(sent,),
    )


def two_stages(spec: PlatformSpec, *, replicas: int = 1, micro_batches: int = 1, **changes: object) -> Plan:
    size = next(size for size in spec.sizes if size.accelerator)
    stages = tuple(Stage(first=i, stop=i + 1, size=size.name, memory_mb=size.memory_mb) for i in (0, 1))
    plan = Plan(
        global_batch=micro_batches * replicas,
        micro_batch=1,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        stages=stages,
        optimizer=OptimizerKind.MOMENTUM,
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def test_a_stage_has_a_memory_on_the_device_and_one_on_the_host() -> None:
    """By hand: parameters, gradients and momentum, constants, activations with workspace, the gradient of what is sent,
    and an eighth of waste; and on the host 1 + 7/4 copies of the gradient to sum, parameters and momentum to save,
    the file of these twice, and each message of 10 bytes twice.
    """
    spec = gpu_platform(gpu_size("gpu", memory_mb=4096, device_mb=4096))
    first = evaluate(two_stages(spec, replicas=4), two_layers(spec), spec).stages[0]
    assert first.device is not None
    assert first.device.has_bytes == 4096 * MB
    assert first.device.needs_bytes == 512 * MB + 3 * 100 + 7 + (40 + 10) + 50 // 8
    assert first.memory_bytes == 300 + DRIVER_BYTES + 275 + 2 * 100 + 2 * 200 + 2 * (10 + 10)
    plan = replace(two_stages(spec), estimate=evaluate(two_stages(spec), two_layers(spec), spec))
    assert from_text(Plan, to_text(plan), source="here") == plan


@pytest.mark.parametrize(
    ("parameter_mb", "sent_mb", "expected_mb"),
    [
        (100, 15, 275 + 2 * 100 + 2 * (15 + 15) + 2 * 64),
        (100, 40, 275 + 2 * 100 + 2 * (40 + 40) + 2 * 64),
        (8, 1, 22 + 2 * 8 + 2 * (1 + 1) + 2 * 16),
    ],
)
def test_the_host_holds_messages_and_a_file_of_a_checkpoint_twice(
    parameter_mb: int, sent_mb: int, expected_mb: int
) -> None:
    """By hand: 200 MB are saved in files of 64 MB; 16 MB in one, whose two copies are 32."""
    spec = gpu_platform(gpu_size("gpu", memory_mb=4096, device_mb=4096))
    profile = two_layers(spec, sent_bytes=sent_mb * MB)
    layers = tuple(replace(layer, parameter_bytes=parameter_mb * MB) for layer in profile.layers)
    first = evaluate(two_stages(spec, replicas=4), replace(profile, layers=layers), spec).stages[0]
    assert first.memory_bytes == 300 + DRIVER_BYTES + expected_mb * MB


def test_files_and_pieces_are_as_large_as_functions_make_them() -> None:
    assert stores.FILE_BYTES == checkpoints.FILE_BYTES
    assert PIECES_BYTES == weight_files._AT_ONCE * weight_files._PIECE_BYTES


def test_the_host_holds_what_it_loads_before_that_is_on_the_device() -> None:
    """By hand: 900 MB that are not trained, read in four pieces of 8 MB at a time, beside 8 MB that are saved."""
    spec = gpu_platform(gpu_size("gpu", memory_mb=4096, device_mb=4096))
    profile = two_layers(spec)
    layers = (replace(layer, parameter_bytes=8 * MB, constant_bytes=900 * MB) for layer in profile.layers)
    profile = replace(profile, layers=tuple(layers))
    for replicas in (1, 4):
        first = evaluate(two_stages(spec, replicas=replicas), profile, spec).stages[0]
        assert first.memory_bytes == 300 + DRIVER_BYTES + (8 + 900 + 32) * MB


def test_adam_s_step_holds_a_copy_of_the_parameters_where_activations_were() -> None:
    """By hand: the first stage has 100 bytes of parameters, and far less of activations, which are gone by then."""
    spec = gpu_platform(gpu_size("gpu", memory_mb=4096, device_mb=4096))
    plan = two_stages(spec, optimizer=OptimizerKind.ADAM)
    profile = two_layers(spec, sent_bytes=16)
    device = evaluate(plan, profile, spec).stages[0].device
    assert device is not None
    assert device.needs_bytes == 512 * MB + 4 * 100 + 7 + 100
    host = evaluate(replace(plan, optimizer=OptimizerKind.MOMENTUM), profile, spec).stages[0]
    adam = evaluate(plan, profile, spec).stages[0]
    assert host.memory_bytes == adam.memory_bytes - 100 - 2 * 100, "to save it, in a file that is there twice"


def test_a_divided_optimiser_and_recomputation_count_on_the_device() -> None:
    spec = gpu_platform(gpu_size("gpu", memory_mb=4096, device_mb=4096))
    profile, plan = two_layers(spec), two_stages(spec, replicas=4, micro_batches=2)
    whole, divided = (
        evaluate(replace(plan, shard_optimizer=shard), profile, spec).stages[1].device for shard in (False, True)
    )
    assert whole is not None
    assert divided is not None
    assert whole.state_bytes - divided.state_bytes == 75
    assert divided.activation_bytes - whole.activation_bytes == 2 * 25, "sums and parameters of a share"
    adam = evaluate(replace(plan, shard_optimizer=True, optimizer=OptimizerKind.ADAM), profile, spec).stages[1].device
    assert adam is not None
    assert adam.activation_bytes - divided.activation_bytes == 25, "the root of its second moments"
    again = evaluate(replace(plan, stages=tuple(replace(s, recompute=True) for s in plan.stages)), profile, spec)
    device = again.stages[1].device
    assert device is not None
    # inputs of two micro-batches, one that is computed again with its workspace, and the gradient of its input
    assert device.activation_bytes == 2 * 10 + 30 + 10 + 10


def test_one_replica_has_no_gradients_until_its_first_backward_makes_them() -> None:
    """By hand, as `working_bytes` has it: two layers as one stage of 80 bytes of activations and 10 of parameters."""
    spec = gpu_platform(gpu_size("gpu", memory_mb=4096, device_mb=4096))
    profile = two_layers(spec, sent_bytes=15)
    first, last = (replace(layer, constant_bytes=0) for layer in profile.layers)
    first = replace(first, parameter_bytes=2, activation_bytes=50, workspace_bytes=20)
    last = replace(last, parameter_bytes=8, activation_bytes=40, device_activation_bytes=30, workspace_bytes=5)
    profile = replace(profile, layers=(first, last))
    assert [*backward_peaks(np.array([0]), np.array([2]), profile)] == [20, 20]
    stage = replace(two_stages(spec).stages[0], stop=2)
    plan = replace(two_stages(spec, micro_batches=2), stages=(stage,))
    four = replace(two_stages(spec, micro_batches=4, schedule=ScheduleKind.ONE_F_ONE_B), stages=(stage,))
    for expected, one in ((2 * 80 + 20 - 10, plan), (80 + 20, four), (2 * 80 + 20, replace(plan, replicas=2))):
        one = replace(one, global_batch=one.global_batch * one.replicas)
        device = evaluate(one, profile, spec).stages[0].device
        assert device is not None
        assert (device.state_bytes, device.activation_bytes) == (30, expected)


def test_a_function_without_a_gpu_needs_what_it_needed_beside_one_with_a_gpu() -> None:
    mixed = gpu_platform(gpu_size("gpu", memory_mb=4096, device_mb=4096), cpus=1)
    profile, gpu_plan = two_layers(mixed), two_stages(mixed, replicas=2)
    stage = replace(gpu_plan.stages[0], size="1024MB", memory_mb=1024)
    plan = replace(gpu_plan, stages=(stage, gpu_plan.stages[1]))
    alone = replace(plan, stages=(stage, replace(stage, first=1, stop=2)))
    here, there = (evaluate(one, profile, mixed).stages[0] for one in (plan, alone))
    assert here == there
    assert here.device is None


@pytest.mark.parametrize(
    ("memory_mb", "device_mb", "lacks"), [(4096, 512, "512 MB on the GPU, which has 512"), (1024, 4096, "1024 MB")]
)
def test_a_plan_is_refused_that_lacks_either_memory(memory_mb: int, device_mb: int, lacks: str) -> None:
    spec = gpu_platform(gpu_size("gpu", memory_mb=memory_mb, device_mb=device_mb), cpus=0)
    profile, plan = two_layers(spec), two_stages(spec)
    with pytest.raises(PlanError, match=f"stage 0 needs {lacks}"):
        check_memory(plan, evaluate(plan, profile, spec))
    with pytest.raises(Infeasible, match="on the GPU" if device_mb < memory_mb else "the largest function has 1024 MB"):
        optimize(profile, spec, TrainingSpec(global_batch=1))


CASES = {
    "neither binds": {"memory_mb": 8192, "device_mb": 8192},
    "device binds": {"memory_mb": 8192, "device_mb": 1100},
    "host binds": {"memory_mb": 1700, "device_mb": 8192},
}


@pytest.mark.parametrize("bus_gb_s", [12.0, 0.03])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_best_of_all_plans_on_functions_with_and_without_gpus(
    case: str, seed: int, bus_gb_s: float
) -> None:
    gpus = (
        gpu_size("gpu", **CASES[case], price_usd_s=2e-5 * (1 + seed), bus_gb_s=bus_gb_s),
        gpu_size("small", memory_mb=4096, device_mb=900, bus_gb_s=3 * bus_gb_s),
    )
    spec = gpu_platform(*gpus, cpus=1 + seed % 2)
    profile = chain(3 if seed % 2 else 4, len(spec.sizes), seed)
    profile = replace(profile, sizes=tuple(size.name for size in spec.sizes))
    training = TrainingSpec(
        global_batch=16,
        optimizer=list(OptimizerKind)[seed % 3],
        recompute=Recompute.AUTO if seed % 2 else Recompute.NEVER,
        replicas=(1, 2),
        sync=Sync.PIPELINED,
        shard_optimizer=seed == 2,
        time_value=[0.0, 30.0, 3000.0][seed],
    )
    problem = Problem(profile=profile, spec=spec, training=training)
    oracle = exhaustive(problem)
    assert oracle.estimate is not None
    check_memory(oracle, oracle.estimate)
    assert problem.goal.of_plan(exact(problem)) == pytest.approx(problem.goal.of_plan(oracle), rel=1e-9)


def test_each_memory_binds_in_a_plan_that_would_be_another_without_that_limit() -> None:
    """The device of one case, and the host of the other, is what moves the best plan away from that size."""
    objectives = {}
    for name, sizes in CASES.items():
        spec = gpu_platform(gpu_size("gpu", **sizes), cpus=1)
        profile = replace(chain(4, 2, 1), sizes=tuple(size.name for size in spec.sizes))
        training = TrainingSpec(global_batch=16, replicas=(1, 2), time_value=3000.0, optimizer=OptimizerKind.ADAM)
        problem = Problem(profile=profile, spec=spec, training=training)
        objectives[name] = problem.goal.of_plan(exact(problem))
    assert objectives["neither binds"] < objectives["device binds"]
    assert objectives["neither binds"] < objectives["host binds"]


def test_seconds_on_a_gpu_follow_from_the_work_of_layers_and_are_told_to_be_estimates() -> None:
    spec = gpu_platform(gpu_size("gpu", memory_mb=4096, device_mb=4096))
    profile = two_layers(spec).on_sizes("gpus", spec.sizes)
    assert profile.estimated
    assert profile.layers[0].forward_s == pytest.approx((1.0, 1e9 / (0.9 * 8.1e12)))
    assert profile.layers[0].backward_s == pytest.approx((2.0, 2e9 / (0.9 * 8.1e12)))
    training = TrainingSpec(global_batch=4, time_value=100.0, replicas=(1,))
    plan = optimize(profile, spec, training)
    assert plan.estimate is not None
    assert plan.estimate.by_rates
    text = render(explain(plan, profile, spec, training))
    assert "seconds on GPUs: estimated from operations and bytes, by published rates" in text
    assert "  GPU      512 of 4096 MB = context 512" in text
    assert ", to host 0 s, to GPU 0 s, then synchronisation" in text
    assert ("seconds on GPUs", "estimated from operations and bytes, by published rates") in described(plan).facts
    columns = [column.name for column in described(plan).tables[0].columns]
    assert "GPU MB" in columns


def test_a_profile_that_counted_no_work_is_to_be_made_again() -> None:
    spec = gpu_platform(gpu_size("gpu", memory_mb=4096, device_mb=4096))
    profile = two_layers(spec)
    old = replace(profile, layers=tuple(replace(layer, forward_work=None) for layer in profile.layers))
    with pytest.raises(InvalidValue, match="work of a must be known for T4; profile the model again"):
        old.on_sizes("gpus", spec.sizes)
    with pytest.raises(InvalidValue, match="must be one that was measured"):
        profile.on_sizes("other", (replace(spec.sizes[0], name="5GB"),), precision=Precision.BF16)


def test_the_form_of_the_paper_refuses_two_memories() -> None:
    spec = gpu_platform(gpu_size("gpu", memory_mb=4096, device_mb=4096))
    training = TrainingSpec(
        global_batch=4, schedule=ScheduleKind.GPIPE, sync=Sync.PIPELINED, recompute=Recompute.NEVER, replicas=(1,)
    )
    from funcpipe.partitioner.mip.chain_form import chain_programme

    with pytest.raises(InvalidValue, match="cannot express the two memories of GPU functions"):
        chain_programme(Problem(profile=two_layers(spec), spec=spec, training=training), longest_s=1.0, unit_usd=1.0)
