"""What a function of each stage needs at its peak, element by element as in `formulas`.

    base + state + activations + waste + data

>>> state_bytes(copies=2, buffers=2, parameter_bytes=100, summed_bytes=100, constant_bytes=7)  # SGD, with replicas
407
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from funcpipe.partitioner.cost import Array, BoolArray
from funcpipe.partitioner.cost.loads import Loads, Setting
from funcpipe.partitioner.cost.stores import objects_fit
from funcpipe.partitioner.cost.sync_ways import any_way_fits
from funcpipe.scheduler.loading import SPARE


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes that one function of each stage needs at its peak, by what takes them."""

    base_bytes: Array
    state_bytes: Array
    activation_bytes: Array
    waste_bytes: Array
    data_bytes: Array

    @property
    def total_bytes(self) -> Array:
        """All of it."""
        return self.base_bytes + self.state_bytes + self.activation_bytes + self.waste_bytes + self.data_bytes


WASTE = 1 / 8
"""What the allocator loses between activations, which come and go, as a share of what they take; what lives as long as
the function lies without gaps (experiments/studies/model_table.py).
"""


def parameter_copies(setting: Setting) -> float:
    """How often a function holds its parameters: themselves, their gradients, and the optimiser's values."""
    return 2 + setting.values_per_parameter


def buffer_copies(setting: Setting) -> float:
    """How often a function that synchronises holds its gradients in addition to the flat vector they are made in.

    Its own split from all others and the messages that brought it take (d − 1)/d each, two messages that go out 1/d
    each: two copies for d > 1 replicas. Sums in 16 bits halve these, but a function's peak falls by a quarter to half a
    copy only (experiments/studies/shard_optimizer.py), so they count as much.
    """
    return 2 if setting.replicas > 1 else 0


def state_bytes(
    *, copies: float, buffers: float, parameter_bytes: Any, summed_bytes: Any, constant_bytes: Any, tied_bytes: Any = 0
) -> Any:
    """What a function holds all the time: parameters, gradients, optimiser, buffers, constants, tied messages."""
    return copies * parameter_bytes + buffers * summed_bytes + constant_bytes + tied_bytes


def waste_bytes(activation_bytes: Any) -> Any:
    """What the allocator loses between activations."""
    return WASTE * activation_bytes


def data_bytes(loads: Loads, setting: Setting, held: Array | float) -> Array:
    """What stages that load data hold of it: the dataset, the batch that is being loaded, and those that are loaded.

    These are as many as `scheduler.loading` lets a stage load that holds `held` micro-batches at once.
    """
    if setting.data is None:
        return np.zeros_like(loads.loads_data)
    ahead = np.minimum(setting.micro_batches_each, held + 1) + SPARE
    dataset_bytes = setting.data.resident_bytes + setting.data.batch_bytes
    total: Array = loads.loads_data * (dataset_bytes + ahead * loads.loaded_bytes)
    return total


def memory_use(loads: Loads, setting: Setting, held: Array | float) -> MemoryUse:
    """Peak bytes of stages that hold `held` micro-batches at once.

    A micro-batch is held as its activations, or under recomputation as its inputs, with the activations of one of them
    in addition. The workspace of one layer counts with the activations, and so does what a joint loss is computed from.
    """
    state = state_bytes(
        copies=parameter_copies(setting),
        buffers=buffer_copies(setting),
        parameter_bytes=loads.parameter_bytes,
        summed_bytes=loads.summed_bytes,
        constant_bytes=loads.constant_bytes,
        tied_bytes=loads.ties.upload_bytes + loads.ties.download_bytes,
    )
    kept = np.where(loads.recompute, loads.input_bytes, loads.activation_bytes + loads.held_input_bytes)
    at_work = loads.workspace_bytes + np.where(loads.recompute, loads.activation_bytes, 0.0)
    activation_bytes = held * kept + at_work + joint_memory_bytes(loads, setting)
    return MemoryUse(
        base_bytes=np.full_like(kept, setting.base_bytes),
        state_bytes=state + np.zeros_like(kept),
        activation_bytes=activation_bytes,
        waste_bytes=waste_bytes(activation_bytes),
        data_bytes=data_bytes(loads, setting, held) + np.zeros_like(kept),
    )


def joint_memory_bytes(loads: Loads, setting: Setting) -> Array:
    """Bytes that a function of each stage holds for the loss: outputs and targets of all micro-batches, as they came
    and as one batch, the gradients of that, and its own message.
    """
    each, all_bytes = setting.micro_batches_each, setting.micro_batches * (setting.joint_bytes or 0.0)
    sent_bytes = each * (setting.joint_bytes or 0.0) if setting.replicas > 1 else 0.0
    total: Array = loads.is_last * (3 * all_bytes + sent_bytes)
    return total


def admitted(loads: Loads, setting: Setting) -> BoolArray:
    """Which stages are possible at all: objects must fit their stores, and a stage that shares parameters with others
    cannot divide its optimiser.
    """
    possible: BoolArray = ~(setting.sharded & (loads.ties.upload_objects > 0)) & objects_fit(loads, setting)
    possible &= any_way_fits(loads, setting)
    return possible
