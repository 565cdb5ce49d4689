"""What a function of each stage needs at its peak, elementwise as in `formulas`."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from funcpipe.partitioner.cost.formulas import Array, Loads, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that one function of each stage needs at its peak, by what takes them."""

    base_bytes: Array
    state_bytes: Array
    activation_bytes: Array
    waste_bytes: Array

    @property
    def total_bytes(self) -> Array:
        """All of it."""
        return self.base_bytes + self.state_bytes + self.activation_bytes + self.waste_bytes


WASTE = 1 / 8
"""What the allocator loses between activations, which come and go, as a share of what they take; what lives as long as
the function lies without gaps (experiments/model_table.py).
"""


def buffer_copies(replicas: int) -> float:
    """How often a function that synchronises holds its gradients besides the flat vector in which they are made: its
    own split of all others and the messages in which it came, (d - 1)/d each, and two messages that go out, 1/d each.
    """
    return 2 if replicas > 1 else 0


def memory_use(loads: Loads, setting: Setting, held: Array | float) -> MemoryUse:
    """Peak bytes: parameters, their gradients and optimiser state, and the buffers of synchronisation; the activations
    of the `held` micro-batches, or their inputs and one micro-batch's activations (recompute); and the workspace of one
    layer, which counts with the activations.
    """
    copies, buffers = 2 + setting.values_per_parameter, buffer_copies(setting.replicas)
    state_bytes = copies * loads.parameter_bytes + buffers * loads.summed_bytes + loads.constant_bytes
    state_bytes = state_bytes + loads.ties.upload_bytes + loads.ties.download_bytes
    kept = np.where(loads.recompute, loads.input_bytes, loads.activation_bytes + loads.held_input_bytes)
    at_work = loads.workspace_bytes + np.where(loads.recompute, loads.activation_bytes, 0.0)
    activation_bytes = held * kept + at_work
    return MemoryUse(
        base_bytes=np.full_like(kept, setting.base_bytes),
        state_bytes=state_bytes + np.zeros_like(kept),
        activation_bytes=activation_bytes,
        waste_bytes=WASTE * activation_bytes,
    )


def admitted(loads: Loads, setting: Setting) -> npt.NDArray[np.bool_]:
    """Whether a stage may be so: one that shares parameters with others has no optimiser divided over replicas."""
    return ~(setting.sharded & (loads.ties.upload_objects > 0))
