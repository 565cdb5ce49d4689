"""Plans made by hand."""

import itertools
from collections.abc import Sequence

from funcpipe.core import Stage


def even_stages(layers: Sequence[str], stages: int, *, recompute: bool = False) -> tuple[Stage, ...]:
    """The `layers` cut into `stages` stages of about as many layers each, all of functions of 1024 MB."""
    cuts = [round(len(layers) * i / stages) for i in range(stages + 1)]
    return tuple(
        Stage(
            first=first, stop=stop, size="1024MB", memory_mb=1024, recompute=recompute, layers=tuple(layers[first:stop])
        )
        for first, stop in itertools.pairwise(cuts)
    )
