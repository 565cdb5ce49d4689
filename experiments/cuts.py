"""Cuts for experiments that want a given number of stages."""

import itertools
from collections.abc import Sequence

from funcpipe.core import ModelProfile, Stage


def even_cuts(profile: ModelProfile, stages: int) -> tuple[str, ...]:
    """The layers at which to cut for `stages` stages of about the same computation, for `Pins(cuts=...)`."""
    times = [layer.forward_s[-1] + layer.backward_s[-1] for layer in profile.layers]
    before = [sum(times[:i]) / sum(times) for i in range(len(times))]
    wanted = [number / stages for number in range(1, stages)]
    places = {min(range(1, len(times)), key=lambda i: abs(before[i] - share)) for share in wanted}
    return tuple(profile.layers[place].graph_layers[0] for place in sorted(places))


def even_stages(layers: Sequence[str], stages: int) -> tuple[Stage, ...]:
    """So many stages of about the same number of `layers`."""
    cuts = [round(len(layers) * i / stages) for i in range(stages + 1)]
    return tuple(
        Stage(first=first, stop=stop, size="1024MB", memory_mb=1024, recompute=False, layers=tuple(layers[first:stop]))
        for first, stop in itertools.pairwise(cuts)
    )
