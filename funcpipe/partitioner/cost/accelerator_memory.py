"""What a function with an accelerator holds while it trains: of its host besides the vector of gradients, to load or to
train, and of the device besides the state.

By hand, in MB, as in `formulas.py`: SGD with momentum on 4 replicas, 100 of parameters, 7 of constants, messages of 10
in and 20 out, forward and backward.

    loading     100 + max(100, 7 + 7), when there are no gradients yet                      200 - 100 = 100
    training    2 · (30 + 30) for messages, 7 / 4 · 100 for sums, 2 · 100 + 2 · 64 for a checkpoint   = 623

What is loaded is on the host before it is on the device: parameters, at first in their message too, then constants,
which are read in pieces, four at once. Messages are there twice, pinned and as they travel. Replicas sum with two
copies of the gradient (`buffer_copies`), less what one of the two messages that go out takes, as they go one by one.
Of a checkpoint all is copied from the device, and written while steps go on: a file, 64 MB at most, is there twice.
Files with tensors that leave room in them are smaller, and a step that takes longer than a checkpoint holds less.
"""

from typing import Any

import numpy as np

from funcpipe.core import MB, OptimizerKind
from funcpipe.partitioner.cost import Array
from funcpipe.partitioner.cost.loads import Loads, Setting
from funcpipe.partitioner.cost.stores import FILE_BYTES

PIECES_BYTES = 4 * 8 * MB
"""Of files of weights, read at once beside the tensors that they are for (`comm/weight_files.py`)."""


def host_bytes(loads: Loads, setting: Setting, *, copies: float, buffers: float, joint_bytes: Any) -> Array:
    """Return the bytes beyond one vector of gradients, if there are several replicas.

    Checkpoints have `copies` of the parameters, sums are made with `buffers` beside that vector, and a joint loss holds
    `joint_bytes`.
    """
    traffic, summed_bytes = loads.traffic, loads.summed_bytes * (setting.replicas > 1)
    messages = traffic.forward_out_bytes + traffic.backward_out_bytes
    messages = 2 * (messages + traffic.forward_in_bytes + traffic.backward_in_bytes)
    sums, saved_bytes = (buffers - 1 / setting.replicas) * summed_bytes, copies * loads.parameter_bytes
    training = messages + joint_bytes + sums + saved_bytes + 2 * np.minimum(saved_bytes, FILE_BYTES)
    constant_bytes = loads.constant_bytes + np.minimum(loads.constant_bytes, PIECES_BYTES)
    loading = loads.parameter_bytes + np.maximum(loads.parameter_bytes, constant_bytes) - summed_bytes
    return np.asarray(np.maximum(training, loading))


def working_bytes(loads: Loads, setting: Setting, held: Array | float) -> Array:
    """Bytes that passes hold on a device at their peak, beside the state with all its gradients.

    One replica has no gradients until its first backward, with all micro-batches held, makes them. After that it holds
    as many micro-batches again if there are more to come, else one less. Several replicas have the vector of gradients
    at all times. By hand, with the layers of `backward_peaks`, 80 MB of activations and 10 of parameters: two
    micro-batches that are all held need 2 * 80 + 20 - 10 = 170 MB in the first backward, and 80 + 20 in the second; of
    four, of which two are held, the second backward needs 2 * 80 + 20 = 180 MB.
    """
    kept = np.where(loads.recompute, loads.input_bytes, loads.device_activation_bytes + loads.held_input_bytes)
    again = np.where(loads.recompute, loads.device_activation_bytes, 0.0)
    beyond, making = loads.peaks
    adding = again + beyond
    if setting.replicas > 1:
        return np.asarray(held * kept + adding)
    left = np.where(np.asarray(held) < setting.micro_batches_each, held, np.asarray(held) - 1)
    first = held * kept + np.minimum(again + making - loads.parameter_bytes, adding)
    return np.asarray(np.maximum(np.maximum(first, np.where(left > 0, left * kept + adding, 0.0)), 0.0))


def step_bytes(loads: Loads, setting: Setting) -> Array:
    """Bytes that the step of an optimiser on a device holds when activations are gone: it updates all parameters at
    once, and Adam's takes the root of all second moments for that. A divided one updates its share beside the last
    backward, and holds the sums and the parameters of that once more.
    """
    each, more = setting.shares, 2.0 if setting.shares > 1 else 0.0
    has_root = round(setting.values_per_parameter * each) >= OptimizerKind.ADAM.values_per_parameter
    return np.asarray((more + has_root) / each * loads.parameter_bytes)
