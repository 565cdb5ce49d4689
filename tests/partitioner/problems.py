"""Problems for whole comparisons, each of one kind, drawn from a seed or from what is asked for."""

import random
from dataclasses import replace

from funcpipe.core import (
    MB,
    DataProfile,
    OptimizerKind,
    Pins,
    Recompute,
    StoreSpec,
    Sync,
    TiedParameter,
    TrainingSpec,
    Wire,
)
from funcpipe.partitioner.problem.problem import Problem
from tests.partitioner.instances import chain, draw_problem, platform, store

DATA = DataProfile(load_s=0.0, batch_bytes=3 * MB, target_bytes=MB, resident_bytes=100 * MB)
PROFILE, SPEC = chain(5, 3, 11), platform(3, shared_bytes_s=None)
ADAM = TrainingSpec(global_batch=32, optimizer=OptimizerKind.ADAM, time_value=30.0)


def divided(seed: int) -> Problem:
    """Whose optimiser is divided over replicas."""
    problem = draw_problem(seed)
    wire = Wire.BF16 if problem.training.wire is Wire.FP16 else problem.training.wire
    return replace(problem, training=replace(problem.training, wire=wire, shard_optimizer=True))


def jointly(seed: int) -> Problem:
    """Whose loss is computed for the whole global batch, from outputs between nothing and many."""
    problem = draw_problem(seed)
    output_bytes = random.Random(seed).choice([0, MB // 10, MB, 20 * MB])
    training = replace(problem.training, joint_loss=True, schedule=None)
    return replace(problem, profile=replace(problem.profile, output_bytes=output_bytes), training=training)


def larger(seed: int) -> Problem:
    """Too large to price all plans."""
    draw = random.Random(seed)
    layers = draw.choice([6, 7, 8, 9])
    sizes = draw.choice([1, 2, 2, 3]) if layers < 8 else draw.choice([1, 2])
    batch = draw.choice([4, 8, 16, 32, 64])
    degree = draw.choice([degree for degree in (1, 2, 4, 8, 16) if batch % (4 * degree) == 0])
    spec = platform(
        sizes,
        shared_cores=draw.choice([None, None, None, None, 2]),
        latency_s=draw.choice([0.0, 0.04, 0.5]),
        price_put_usd=draw.choice([0.0, 5e-6, 2e-5]),
    )
    training = TrainingSpec(global_batch=batch, replicas=(degree,), recompute=draw.choice(list(Recompute)))
    profile = chain(layers, sizes, seed, skips=draw.choice([0, 0, 0, 1, 2]))
    if degree > 2 or layers > 6:  # the plain search keeps every way of synchronising of every stage
        training = replace(training, sync=Sync.STREAMED if degree > 2 else Sync.EXCHANGE)
    return Problem(profile=profile, spec=spec, training=training)


def with_data(problem: Problem, data: DataProfile) -> Problem:
    """Whose first layer reads loaded samples."""
    first, *others = problem.profile.layers
    layers = (replace(first, input_bytes=2 * MB), *(replace(layer, input_bytes=0) for layer in others))
    return replace(problem, profile=replace(problem.profile, layers=layers, data=data))


def draw_stores(seed: int) -> tuple[StoreSpec, ...]:
    draw = random.Random(seed)
    return tuple(
        store(
            f"s{number}",
            latency_s=draw.choice([0.0, 0.002, 0.02, 0.3]),
            price_put_usd=draw.choice([0.0, 1e-6, 2e-5]),
            price_get_usd=draw.choice([0.0, 1e-7, 4e-6]),
            price_sent_usd_gb=draw.choice([0.0, 0.003]),
            price_received_usd_gb=draw.choice([0.0, 0.001]),
            price_usd_h=draw.choice([0.0, 0.0, 0.25]),
            bytes_s=draw.choice([None, None, 1e7]),
            shared_bytes_s=draw.choice([None, None, 6e7, 5e8]),
            largest_bytes=draw.choice([None, 4 * MB, 64 * MB]),
        )
        for number in range(draw.choice([1, 2]))
    )


def with_stores(seed: int) -> Problem:
    """On a platform with one or two further stores."""
    problem = draw_problem(seed)
    return replace(problem, spec=replace(problem.spec, stores=draw_stores(seed)))


def in_16_bits(sync: Sync | None, sharded: bool) -> Problem:
    """Whose sums travel in 16 bits."""
    training = replace(ADAM, sync=sync, shard_optimizer=sharded, replicas=(1, 4), wire_sync=Wire.BF16)
    return Problem(profile=PROFILE, spec=SPEC, training=training)


def tied(sharded: bool) -> Problem:
    """Whose first and last layer share half a parameter."""
    tie = TiedParameter(name="tied", layers=(0, 4), parameter_bytes=PROFILE.layers[0].parameter_bytes // 2)
    training = replace(ADAM, shard_optimizer=sharded, replicas=(2,), time_value=3000.0)
    return Problem(profile=replace(PROFILE, ties=(tie,)), spec=SPEC, training=training)


def pinned(seed: int) -> Problem:
    """With a cut, sizes of some layers and a number of functions that are pinned, or some of these."""
    draw = random.Random(seed)
    layers = [f"layer{i}" for i in range(5)]
    pins = Pins(
        cuts=tuple(draw.sample(layers[1:], draw.choice([0, 1]))),
        sizes={layer: draw.choice(["1024MB", "2048MB"]) for layer in draw.sample(layers, draw.choice([0, 1, 2]))},
        max_functions=draw.choice([None, 2, 3]),
    )
    training = TrainingSpec(global_batch=16, time_value=60.0)
    return Problem(profile=chain(5, 2, seed, skips=seed % 3), spec=platform(2), training=training, pins=pins)
