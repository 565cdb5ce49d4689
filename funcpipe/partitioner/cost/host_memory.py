"""What a function with an accelerator holds of its host besides the vector of gradients: the more of two moments.

By hand, in MB, as in `formulas.py`: SGD with momentum on 4 replicas, 100 of parameters, 7 of constants, messages of 10
in and 20 out, forward and backward.

    loading     100 + max(100, 7 + 7), when there are no gradients yet                        200 - 100 = 100
    training    2 · (30 + 30) for messages, 2 · 100 for sums, 2 · 100 to save, and 2 · 64 for a file    = 648

What is loaded is on the host before it is on the device: parameters, at first in their message too, then constants,
which are read in pieces, four at once. Messages are there pinned and as they travel. Of a checkpoint, parameters and
momentum are copied from the device at once, into memory that is kept for the next one; it is written while steps go on,
and a file of it, 64 MB at most, is there twice. Files with tensors that leave room in them are smaller than that.
"""

from typing import Any

import numpy as np

from funcpipe.core import MB
from funcpipe.partitioner.cost import Array
from funcpipe.partitioner.cost.loads import Loads, Setting
from funcpipe.partitioner.cost.stores import FILE_BYTES

PIECES_BYTES = 4 * 8 * MB
"""Of files of weights, read at once beside the tensors that they are for (`comm/weight_files.py`)."""


def passing_bytes(loads: Loads, setting: Setting, *, copies: float, buffers: float, joint_bytes: Any) -> Array:
    """Return the bytes beyond one vector of gradients, if there are several replicas.

    Checkpoints have `copies` of the parameters, sums are made with `buffers` beside that vector, and a joint loss holds
    `joint_bytes`.
    """
    traffic, summed_bytes = loads.traffic, loads.summed_bytes * (setting.replicas > 1)
    pinned_bytes = traffic.forward_out_bytes + traffic.backward_out_bytes
    pinned_bytes = pinned_bytes + traffic.forward_in_bytes + traffic.backward_in_bytes
    saved_bytes = copies * loads.parameter_bytes
    training = 2 * pinned_bytes + joint_bytes + buffers * summed_bytes + saved_bytes
    training = training + 2 * np.minimum(saved_bytes, FILE_BYTES)
    constant_bytes = loads.constant_bytes + np.minimum(loads.constant_bytes, PIECES_BYTES)
    loading = loads.parameter_bytes + np.maximum(loads.parameter_bytes, constant_bytes) - summed_bytes
    return np.asarray(np.maximum(training, loading))
