"""Values of every kind, drawn at random."""

from typing import Any

from hypothesis import strategies as st

from funcpipe.core import (
    SYNC_WIRES,
    CodecCost,
    Estimate,
    FunctionSize,
    LayerProfile,
    ModelProfile,
    Numerics,
    Optimality,
    OptimizerKind,
    Plan,
    PlanRequest,
    PlatformSpec,
    Recompute,
    ScheduleKind,
    SolverReport,
    Stage,
    StageEstimate,
    StoreEstimate,
    Stores,
    StoreSpec,
    Streams,
    Sync,
    TensorProfile,
    TrainingSpec,
    Wire,
)
from funcpipe.core.accelerator import Accelerator

counts = st.integers(0, 2**50)
seconds = st.floats(0, 1e6)
names = st.text(min_size=1, max_size=12)


@st.composite
def profiles(draw: st.DrawFn) -> ModelProfile:
    sizes = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    layer_names = draw(st.lists(names, min_size=1, max_size=6, unique=True))
    times = st.lists(seconds, min_size=len(sizes), max_size=len(sizes)).map(tuple)
    layers = tuple(
        LayerProfile(
            name=name,
            parameter_bytes=draw(counts),
            activation_bytes=draw(counts),
            forward_s=draw(times),
            backward_s=draw(times),
            input_bytes=draw(counts),
        )
        for name in layer_names
    )
    tensors = []
    for producer in range(len(layers) - 1):
        consumers = draw(st.sets(st.integers(producer + 1, len(layers) - 1), min_size=1))
        tensors.append(
            TensorProfile(
                name=f"t{producer}",
                producer=producer,
                consumers=tuple(sorted(consumers)),
                forward_bytes=draw(counts),
                backward_bytes=draw(counts),
            )
        )
    return ModelProfile(
        model=draw(names),
        micro_batch=draw(st.integers(1, 64)),
        platform=draw(names),
        sizes=tuple(sizes),
        base_memory_bytes=draw(counts),
        layers=layers,
        tensors=tuple(tensors),
        estimated=draw(st.booleans()),
    )


store_specs = st.builds(
    StoreSpec,
    name=names.map("store-{}".format),
    what=names,
    latency_s=seconds,
    price_put_usd=seconds,
    price_get_usd=seconds,
    price_empty_get_usd=st.none() | seconds,
    price_sent_usd_gb=seconds,
    price_received_usd_gb=seconds,
    price_usd_h=seconds,
    bytes_s=st.none() | st.floats(1, 1e12),
    shared_bytes_s=st.none() | st.floats(1, 1e12),
    puts_s=st.none() | st.floats(1, 1e6),
    gets_s=st.none() | st.floats(1, 1e6),
    largest_bytes=st.none() | st.integers(1, 2**40),
    durable=st.booleans(),
    polled=st.booleans(),
    sources=st.dictionaries(st.sampled_from(["latency_s", "durable"]), names),
)


accelerators = st.builds(
    Accelerator,
    name=names,
    memory_mb=st.integers(1, 2**20),
    vcpu_equivalents=st.floats(0.1, 1e4),
    fp32_tflop_s=st.floats(0.1, 1e4),
    bf16_tflop_s=st.none() | st.floats(0.1, 1e4),
    memory_gb_s=st.floats(0.1, 1e4),
    host_device_gb_s=st.floats(0.1, 1e4),
)
codec_costs = st.builds(CodecCost, encode_s_gb=seconds, decode_s_gb=seconds)


@st.composite
def platforms(draw: st.DrawFn) -> PlatformSpec:
    memory = sorted(draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=5, unique=True)))
    rate = st.floats(1, 1e12)
    sizes = tuple(
        FunctionSize(
            name=f"{mb}MB",
            memory_mb=mb,
            vcpu=draw(st.floats(0.01, 64)),
            upload_bytes_s=draw(rate),
            download_bytes_s=draw(rate),
            price_usd_s=draw(seconds),
            accelerator=draw(st.none() | accelerators),
        )
        for mb in memory
    )
    return PlatformSpec(
        name=draw(names),
        region=draw(names),
        as_of="2026-11",
        source=draw(names),
        sources=draw(st.dictionaries(st.sampled_from(["vcpu", "latency_s"]), names)),
        sizes=sizes,
        latency_s=draw(seconds),
        contention=draw(st.floats(1, 10)),
        shared_bytes_s=draw(st.none() | rate),
        price_put_usd=draw(seconds),
        price_get_usd=draw(seconds),
        price_invocation_usd=draw(seconds),
        lifetime_s=draw(st.none() | st.floats(1, 1e5)),
        cold_start_s=draw(seconds),
        max_functions=draw(st.integers(1, 10_000)),
        max_payload_bytes=draw(st.integers(1, 2**24)),
        shared_cores=draw(st.none() | st.integers(1, 128)),
        stores=draw(st.lists(store_specs, max_size=2, unique_by=lambda store: store.name).map(tuple)),
        puts_s=draw(st.none() | rate),
        polled=draw(st.booleans()),
        largest_bytes=draw(st.none() | st.integers(1, 2**40)),
        codecs=draw(st.dictionaries(st.sampled_from(["bf16", "int8"]), codec_costs)),
    )


stage_estimates = st.builds(
    StageEstimate,
    base_bytes=counts,
    state_bytes=counts,
    activation_bytes=counts,
    forward_s=seconds,
    forward_upload_s=seconds,
    forward_download_s=seconds,
    backward_s=seconds,
    backward_upload_s=seconds,
    backward_download_s=seconds,
    sync_s=seconds,
    forward_to_host_s=seconds,
    forward_to_device_s=seconds,
    backward_to_host_s=seconds,
    backward_to_device_s=seconds,
)
store_estimates = st.builds(
    StoreEstimate,
    kind=st.sampled_from(["messages", "sums"]),
    store=names,
    puts=counts,
    gets=counts,
    sent_bytes=counts,
    received_bytes=counts,
    request_usd=seconds,
    transfer_usd=seconds,
    hours_usd=seconds,
)
stores = st.builds(Stores, messages=names, sums=names, checkpoints=names)
estimates = st.builds(
    Estimate,
    iteration_s=seconds,
    cost_usd=seconds,
    compute_usd=seconds,
    request_usd=seconds,
    peak_memory_bytes=counts,
    puts=counts,
    gets=counts,
    bottleneck=names,
    stages=st.lists(stage_estimates, max_size=3).map(tuple),
    hours_usd=seconds,
    stores=st.lists(store_estimates, max_size=2).map(tuple),
)
solver_reports = st.builds(
    SolverReport,
    name=names,
    status=st.sampled_from(Optimality),
    objective=seconds,
    gap=st.none() | seconds,
    solve_s=seconds,
    bound=st.none() | seconds,
    simulated_plans=st.none() | counts,
    simulated_s=st.none() | seconds,
    simulated_usd=st.none() | seconds,
)


wires = st.sampled_from(
    [(wire, sums) for wire in Wire for sums in SYNC_WIRES if (wire, sums) != (Wire.FP16, Wire.INT8)]
)
"""Formats of messages and of sums that go together."""


def local_steps(
    draw: st.DrawFn, *, wire: Wire, wire_sync: Wire, sharded: bool, words: tuple[str, ...]
) -> dict[str, Any]:
    """Draw how often replicas meet, and how: every step, where they may not train alone."""
    every = draw(st.just(1) | st.integers(1, 1000) | st.sampled_from(words))
    if every == 1 or wire is Wire.FP16 or (sharded and wire_sync is not Wire.FP32):
        return {}
    lr, momentum = st.floats(1e-6, 10), st.floats(0, 2)
    at_most = {"sync_every_at_most": draw(st.integers(1, 64))} if every == "auto" else {}
    most = at_most.get("sync_every_at_most", 1) if isinstance(every, str) else every
    fragments = draw(st.integers(1, most))
    return {
        "sync_every": every,
        "outer_lr": draw(lr),
        "outer_momentum": draw(momentum),
        "sync_fragments": fragments,
        "sync_delay": 0 if sharded else draw(st.integers(0, (most - 1) // fragments)),
        **at_most,
    }


requests = st.builds(PlanRequest, profile=profiles(), spec=platforms())


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    micro_batch, replicas = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    sync = draw(st.sampled_from(Sync))
    wire, wire_sync = draw(wires)
    cuts = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=5)))
    stages = tuple(
        Stage(
            first=first,
            stop=stop,
            size=draw(names),
            memory_mb=draw(st.integers(1, 20_000)),
            recompute=draw(st.booleans()),
            layers=tuple(draw(st.lists(names, max_size=3))),
            **draw(st.sampled_from([{}, {"sync": sync}, {"sync": sync, "streams": Streams(4, 2, 1)}])),
        )
        for first, stop in zip([0, *cuts], cuts, strict=False)
    )
    sharded = sync.shares_sums and wire is not Wire.FP16 and draw(st.booleans())
    return Plan(
        global_batch=micro_batch * replicas * draw(st.integers(1, 8)),
        micro_batch=micro_batch,
        replicas=replicas,
        schedule=draw(st.sampled_from(ScheduleKind)),
        sync=sync,
        wire=wire,
        wire_sync=wire_sync,
        shard_optimizer=sharded,
        stages=stages,
        optimizer=draw(st.sampled_from(OptimizerKind)),
        estimate=draw(st.none() | estimates),
        solver=draw(st.none() | solver_reports),
        stores=draw(stores),
        request=draw(st.none() | requests),
        **local_steps(draw, wire=wire, wire_sync=wire_sync, sharded=sharded, words=("end",)),
    )


@st.composite
def _training_specs(draw: st.DrawFn) -> TrainingSpec:
    wire, wire_sync = draw(wires)
    return TrainingSpec(
        global_batch=draw(st.integers(1, 4096)),
        optimizer=draw(st.sampled_from(OptimizerKind)),
        wire=wire,
        wire_sync=wire_sync,
        numerics=draw(st.sampled_from(Numerics)),
        recompute=draw(st.sampled_from(Recompute)),
        schedule=draw(st.none() | st.sampled_from(ScheduleKind)),
        replicas=draw(st.none() | st.lists(st.integers(1, 64), max_size=4).map(tuple)),
        time_value=draw(seconds),
        stores=draw(stores),
        deadline_s=draw(st.none() | st.floats(1e-6, 1e6)),
        **local_steps(draw, wire=wire, wire_sync=wire_sync, sharded=False, words=("end", "auto")),
    )


training_specs = _training_specs()
