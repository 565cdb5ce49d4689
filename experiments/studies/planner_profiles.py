"""Profiles to plan with: made from published sizes and assumed seconds, of any number of layers.

Parameters, activations and boundaries of the four reference models are those of the FuncPipe paper's models; how they
spread over the layers, and the seconds, are assumptions, drawn from a seed.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from funcpipe.core import LayerProfile, ModelProfile, PlatformSpec, TensorProfile, read

MICRO_BATCH = 4
SPEC = Path(__file__).parents[2] / "funcpipe/platforms/specs/aws-lambda.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model in a few numbers: megabytes (10^6) in all or for one sample, and seconds forward on one vCPU.

    `alike` says that all layers are the same; else they differ at random, activations and boundaries fall towards the
    end and parameters rise.
    """

    layers: int
    parameter_mb: float
    activation_mb: float
    boundary_mb: tuple[float, float]
    forward_s: float
    alike: bool = False


SHAPES = {
    "resnet101": Shape(layers=30, parameter_mb=178.2, activation_mb=160, boundary_mb=(6.4, 0.4), forward_s=5.0),
    "amoebanet-d18": Shape(layers=24, parameter_mb=489.9, activation_mb=380, boundary_mb=(7.7, 1.3), forward_s=8.0),
    "amoebanet-d36": Shape(layers=42, parameter_mb=944.8, activation_mb=620, boundary_mb=(7.7, 1.3), forward_s=16.0),
    "bert-large": Shape(
        layers=26, parameter_mb=1209.3, activation_mb=255, boundary_mb=(0.27, 0.27), forward_s=7.0, alike=True
    ),
}


def platform() -> PlatformSpec:
    """AWS Lambda with its eight sizes."""
    return read(PlatformSpec, SPEC)


def profile(name: str, spec: PlatformSpec, *, layers: int | None = None, seed: int = 0) -> ModelProfile:
    """The profile of a reference model on `spec`, if need be with another number of layers."""
    shape = SHAPES[name]
    count = layers or shape.layers
    draw = random.Random(seed)
    weights = [_weights(shape, i, count, draw) for i in range(count)]
    totals = [sum(column) for column in zip(*weights, strict=True)]
    made = []
    for i, (time, parameters, activations) in enumerate(weights):
        seconds = MICRO_BATCH * shape.forward_s / 4 * time / totals[0]
        parallel = 0.95 if shape.alike else draw.uniform(0.85, 0.99)
        forward_s = tuple(seconds / _speed_up(size.vcpu, parallel) for size in spec.sizes)
        ratio = 2.0 if shape.alike else draw.uniform(1.8, 2.3)
        made.append(
            LayerProfile(
                name=f"layer{i}",
                parameter_bytes=int(shape.parameter_mb * 1e6 * parameters / totals[1]),
                activation_bytes=int(shape.activation_mb * 1e6 * MICRO_BATCH * activations / totals[2]),
                forward_s=forward_s,
                backward_s=tuple(ratio * s for s in forward_s),
            )
        )
    return ModelProfile(
        model=name,
        micro_batch=MICRO_BATCH,
        platform=spec.name,
        sizes=tuple(size.name for size in spec.sizes),
        base_memory_bytes=300 * 2**20,
        layers=tuple(made),
        tensors=tuple(_boundary(shape, i, count, draw) for i in range(count - 1)),
        estimated=True,
    )


def _weights(shape: Shape, place: int, count: int, draw: random.Random) -> tuple[float, float, float]:
    """A layer's weight in seconds, parameters and activations."""
    if shape.alike:
        return 1.0, 1.0, 1.0
    depth = place / count
    return (
        draw.uniform(0.5, 1.5),
        draw.uniform(0.2, 1.0) * (0.3 + 2 * depth),
        draw.uniform(0.5, 1.5) * (2 - 1.7 * depth),
    )


def _boundary(shape: Shape, place: int, count: int, draw: random.Random) -> TensorProfile:
    first, last = shape.boundary_mb
    noise = 1.0 if shape.alike else draw.uniform(0.8, 1.2)
    size = int(MICRO_BATCH * 1e6 * noise * (first + (last - first) * place / count))
    return TensorProfile(
        name=f"boundary{place}", producer=place, consumers=(place + 1,), forward_bytes=size, backward_bytes=size
    )


def _speed_up(vcpu: float, parallel: float) -> float:
    """Amdahl's law above one vCPU, proportional below."""
    return vcpu if vcpu < 1 else 1 / (1 - parallel + parallel / vcpu)
