"""The rounding errors of 8-bit sums of one replica's gradients, as part of its checkpoints.

Each replica has its own: so where gradients are summed in 8 bits, every replica saves a part of the stage, as where the
optimiser is divided (`state_shards.py`). The tensors of replica 1 are "residual/1/sent" and "residual/1/summed". A
worker that is restarted or handed over goes on with them, to the bit. A run that is resumed begins without, because the
gradients may be cut otherwise then; so does a stage after a step that was left out.
"""

from dataclasses import replace

from funcpipe.comm.collectives import Pattern
from funcpipe.comm.error_feedback import ErrorFeedback
from funcpipe.comm.int8_chunks import summed_ranges
from funcpipe.training.gradients import Layout
from funcpipe.training.state import StageState, mismatch_is_corrupt

RESIDUAL = "residual/"


class Residuals:
    """The error feedback of `replica`, whose gradients lie as `layout` says and are summed as `pattern` says."""

    def __init__(self, layout: Layout, pattern: Pattern, replica: int) -> None:
        ranges = summed_ranges(layout.elements, pattern, layout.head, replica)
        self.feedback = ErrorFeedback(layout.elements - layout.head, ranges)
        own = f"{RESIDUAL}{replica}/"
        self._tensors = {own + "sent": self.feedback.sent, own + "summed": self.feedback.summed}

    def added_to(self, state: StageState) -> StageState:
        """Return `state` with the residuals; their tensors are not copied."""
        return replace(state, tensors={**state.tensors, **self._tensors})

    def restore(self, state: StageState) -> None:
        """Go back to the residuals in `state`: 0 if it holds none. Raises CorruptMessage if they do not fit."""
        if not any(name.startswith(RESIDUAL) for name in state.tensors):
            self.feedback.clear()
            return
        with mismatch_is_corrupt():
            for name, tensor in self._tensors.items():
                tensor.copy_(state.tensors[name])


def without_residuals(state: StageState) -> StageState:
    """Return `state` as a run that is resumed takes it."""
    kept = {name: tensor for name, tensor in state.tensors.items() if not name.startswith(RESIDUAL)}
    return replace(state, tensors=kept)
