"""Small planning problems to test with: platforms, chains and graphs of layers, drawn from a seed."""

import random
from dataclasses import replace

from funcpipe.core import FunctionSize, LayerProfile, ModelProfile, PlatformSpec, TensorProfile

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


def chain(layers: int, sizes: int = 3, seed: int = 0, *, skips: int = 0, micro_batch: int = 4) -> ModelProfile:
    """A model of `layers` layers, each fed by the one before, with `skips` further connections at random."""
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
    )


def _tensor(number: int, producer: int, consumers: tuple[int, ...], draw: random.Random) -> TensorProfile:
    size = int(draw.uniform(0.1, 12) * MB)
    return TensorProfile(
        name=f"tensor{number}",
        producer=producer,
        consumers=consumers,
        forward_bytes=size,
        backward_bytes=draw.choice([size, size, size, 0]),
    )
