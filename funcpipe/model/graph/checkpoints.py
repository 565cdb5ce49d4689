"""Gradient checkpointing in a forward pass is transparent to tracers: what it runs is traced like any other code."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import checkpoint

CHECKPOINTS = "gradient checkpointing in the forward pass is left out: the plan's `recompute` decides it for each stage"
"""A note for a model of which they are met."""


class Checkpoints:
    """Whether the code asked for gradient checkpointing."""

    met = False


@contextlib.contextmanager
def transparent_checkpoints() -> Iterator[Checkpoints]:
    """Have torch.utils.checkpoint just call the functions that it is given, and notice that it was used."""
    found = Checkpoints()
    generator = checkpoint._checkpoint_without_reentrant_generator
    own = vars(checkpoint.CheckpointFunction).get("apply")

    def without_reentry(*args: Any, **kwargs: Any) -> Iterator[None]:
        found.met = True
        yield

    def reentrant(cls: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        found.met = True
        return function(*args)

    checkpoint._checkpoint_without_reentrant_generator = without_reentry
    checkpoint.CheckpointFunction.apply = classmethod(reentrant)  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        checkpoint._checkpoint_without_reentrant_generator = generator
        if own is None:
            del checkpoint.CheckpointFunction.apply
        else:
            checkpoint.CheckpointFunction.apply = own  # type: ignore[method-assign]
