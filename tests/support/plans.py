"""Plans and profiles made by hand."""

import itertools
from collections.abc import Sequence

from funcpipe.core import (
    LayerProfile,
    ModelProfile,
    PlatformSpec,
    Routes,
    ScheduleKind,
    Stage,
    Streams,
    Sync,
    TensorProfile,
    TiedParameter,
)
from funcpipe.scheduler.graph import StepShape


def even_stages(layers: Sequence[str], stages: int, *, recompute: bool = False) -> tuple[Stage, ...]:
    """The `layers` cut into `stages` stages of about as many layers each, all of functions of 1024 MB."""
    cuts = [round(len(layers) * i / stages) for i in range(stages + 1)]
    return tuple(
        Stage(
            first=first, stop=stop, size="1024MB", memory_mb=1024, recompute=recompute, layers=tuple(layers[first:stop])
        )
        for first, stop in itertools.pairwise(cuts)
    )


def chain_profile(
    layers: Sequence[LayerProfile],
    spec: PlatformSpec,
    *,
    sent_bytes: int | Sequence[int] = 10**5,
    micro_batch: int = 1,
    base_memory_bytes: int = 0,
    ties: tuple[TiedParameter, ...] = (),
) -> ModelProfile:
    """Layers measured for the sizes of `spec`, each of which sends so many bytes to the next one, and gets as many.

    With `sent_bytes` of () nothing is sent.
    """
    sizes = [sent_bytes] * (len(layers) - 1) if isinstance(sent_bytes, int) else sent_bytes
    return ModelProfile(
        model="chain",
        micro_batch=micro_batch,
        platform=spec.name,
        sizes=tuple(size.name for size in spec.sizes),
        base_memory_bytes=base_memory_bytes,
        layers=tuple(layers),
        tensors=tuple(
            TensorProfile(name=f"t{i}", producer=i, consumers=(i + 1,), forward_bytes=size, backward_bytes=size)
            for i, size in enumerate(sizes)
        ),
        ties=ties,
    )


def sum_shape(sync: Sync, replicas: int, streams: Streams | None = None) -> StepShape:
    """The shape of a step of one stage, the replicas of which sum a gradient."""
    return StepShape(
        stages=1,
        replicas=replicas,
        micro_batches=replicas,
        routes=Routes(activations=(), gradients=()),
        schedule=ScheduleKind.GPIPE,
        sync=sync,
        streams=streams,
    )
