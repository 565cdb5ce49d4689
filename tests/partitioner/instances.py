"""Small planning problems to test with: platforms, chains and graphs of layers, whole problems, drawn from a seed."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from funcpipe.core import (
    SYNC_WIRES,
    FunctionSize,
    LayerProfile,
    ModelProfile,
    OptimizerKind,
    PlatformSpec,
    Recompute,
    ScheduleKind,
    StoreSpec,
    TensorProfile,
    TiedParameter,
    TrainingSpec,
    Wire,
)
from funcpipe.partitioner.problem.goal import LIMIT_SLACK
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exhaustive import all_cuts, price_variants

MB = 2**20


def platform(sizes: int = 3, **changes: object) -> PlatformSpec:
    """A platform of `sizes` sizes, 1 GB apart; larger ones have faster links."""
    spec = PlatformSpec(
        name="test",
        region="here",
        as_of="2026-11",
        source="made up",
        sizes=tuple(
            FunctionSize(
                name=f"{1024 * k}MB",
                memory_mb=1024 * k,
                vcpu=0.5 * k,
                upload_bytes_s=2e7 + 1e7 * k,
                download_bytes_s=2.5e7 + 1e7 * k,
                price_usd_s=1.6e-5 * k,
            )
            for k in range(1, sizes + 1)
        ),
        latency_s=0.04,
        contention=1.0,
        shared_bytes_s=None,
        price_put_usd=5e-6,
        price_get_usd=4e-7,
        price_invocation_usd=2e-7,
        lifetime_s=900.0,
        cold_start_s=2.5,
        max_functions=1000,
        max_payload_bytes=2**20,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def store(name: str, **changes: object) -> StoreSpec:
    """A store that costs by the request, without limits of its own."""
    spec = StoreSpec(name=name, what=f"a test's {name}", latency_s=0.01, price_put_usd=1e-6, price_get_usd=1e-7)
    return replace(spec, **changes)  # type: ignore[arg-type]


def chain(layers: int, sizes: int = 3, seed: int = 0, *, skips: int = 0, micro_batch: int = 4) -> ModelProfile:
    """A model of `layers` layers, each fed by the one before.

    With `skips` further connections and, if there are any, up to two tied parameters at random.
    """
    draw = random.Random(seed)
    made = []
    for i in range(layers):
        slow_s = draw.uniform(0.05, 1.0)
        share = draw.uniform(0.5, 1.0)
        seconds = tuple(slow_s / k**share for k in range(1, sizes + 1))
        made.append(
            LayerProfile(
                name=f"layer{i}",
                parameter_bytes=int(draw.choice([1, 10, 60, 150]) * draw.uniform(0.5, 1.5) * MB),
                activation_bytes=int(draw.uniform(1, 60) * MB),
                forward_s=seconds,
                backward_s=tuple(s * draw.uniform(1.5, 2.5) for s in seconds),
                constant_bytes=draw.choice([0, 0, 5 * MB]),
                input_bytes=draw.choice([0, 3 * MB]) if i else 2 * MB,
                workspace_bytes=draw.choice([0, 40 * MB]),
            )
        )
    ends: list[tuple[int, tuple[int, ...]]] = [(i, (i + 1,)) for i in range(layers - 1)]
    for _ in range(skips if layers > 2 else 0):
        producer = draw.randrange(layers - 2)
        count = draw.randint(1, min(3, layers - producer - 1))
        ends.append((producer, tuple(sorted(draw.sample(range(producer + 1, layers), count)))))
    return ModelProfile(
        model="random",
        micro_batch=micro_batch,
        platform="test",
        sizes=tuple(f"{1024 * k}MB" for k in range(1, sizes + 1)),
        base_memory_bytes=200 * MB,
        layers=tuple(made),
        tensors=tuple(_tensor(i, producer, consumers, draw) for i, (producer, consumers) in enumerate(ends)),
        ties=tuple(_tie(i, made, draw) for i in range(draw.choice([0, 1, 2]) if skips and layers > 1 else 0)),
    )


def _tie(number: int, layers: list[LayerProfile], draw: random.Random) -> TiedParameter:
    users = sorted(draw.sample(range(len(layers)), draw.randint(2, min(3, len(layers)))))
    size = min(layers[user].parameter_bytes for user in users) // 2
    return TiedParameter(name=f"tied{number}", layers=tuple(users), parameter_bytes=size)


def _tensor(number: int, producer: int, consumers: tuple[int, ...], draw: random.Random) -> TensorProfile:
    size = int(draw.uniform(0.1, 12) * MB)
    savers = sorted(draw.sample((producer, *consumers), draw.randint(0, 1 + len(consumers))))
    return TensorProfile(
        name=f"tensor{number}",
        producer=producer,
        consumers=consumers,
        forward_bytes=size,
        backward_bytes=draw.choice([size, size, size, 0]),
        saved_by=tuple(savers),
    )


def draw_problem(seed: int) -> Problem:
    """A problem small enough to price all its plans, with any of the things that a problem may have."""
    draw = random.Random(seed)
    layers = draw.choice([2, 3, 4, 5])
    sizes = draw.choice([1, 2, 3]) if layers < 5 else draw.choice([1, 2])
    spec = platform(
        sizes,
        shared_bytes_s=draw.choice([None, None, None, 3e7, 1e8]),
        shared_cores=draw.choice([None, None, None, 2]),
        max_functions=draw.choice([1000, 1000, 4]),
        contention=draw.choice([1.0, 1.2]),
        latency_s=draw.choice([0.0, 0.04, 0.5]),
        lifetime_s=draw.choice([None, 900.0, 30.0]),
    )
    if draw.random() < 0.1:
        free = tuple(replace(size, price_usd_s=0.0) for size in spec.sizes)
        spec = replace(spec, price_put_usd=0.0, price_get_usd=0.0, sizes=free)
    training = TrainingSpec(
        global_batch=draw.choice([4, 16, 32]),
        time_value=draw.choice([0, 0, 3.84, 30, 300]),
        optimizer=draw.choice(list(OptimizerKind)),
        wire=draw.choice(list(Wire)),
        recompute=draw.choice(list(Recompute)),
    )
    profile = chain(layers, sizes, seed, skips=draw.choice([0, 0, 2, 4]))
    schedule = draw.choice([None, None, *ScheduleKind])
    sums = [wire for wire in SYNC_WIRES if (training.wire, wire) != (Wire.FP16, Wire.INT8)]
    training = replace(training, schedule=schedule, wire_sync=draw.choice(sums))
    return Problem(profile=profile, spec=spec, training=training)


def with_limits(problem: Problem, iteration_s: float, cost_usd: float, seed: int) -> Iterator[Problem]:
    """The problem as it is, with a deadline, and with a budget, both around what one of its plans takes."""
    draw = random.Random(seed)
    deadline_s, budget_usd = iteration_s * draw.uniform(0.4, 1.2), max(1e-9, cost_usd * draw.uniform(0.9, 2))
    yield problem
    yield replace(problem, training=replace(problem.training, deadline_s=deadline_s))
    yield replace(problem, training=replace(problem.training, budget_usd=budget_usd))


def all_points(problem: Problem) -> list[tuple[float, float]]:
    """Seconds and dollars of every plan of the problem, in ascending order."""
    points = []
    for setting, cuts in itertools.product(problem.settings(), all_cuts(len(problem.profile.layers))):
        if len(cuts) * setting.replicas <= problem.max_functions:
            _, plans = price_variants(problem, setting, cuts)
            points += list(zip(plans.iteration_s.tolist(), plans.cost_usd.tolist(), strict=True))
    return sorted(point for point in points if point[0] <= problem.goal.deadline_s * (1 + LIMIT_SLACK))


def front_of(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that none beats in both, rounding aside."""
    front: list[tuple[float, float]] = []
    for seconds, dollars in points:
        if not front or dollars < front[-1][1] * (1 - 1e-9):
            if front and seconds <= front[-1][0] * (1 + 1e-9):
                front.pop()
            front.append((seconds, dollars))
    return front
