"""The exchange of outputs by the replicas of the last stage, for a loss that is computed once for the global batch.

Each replica puts the outputs and targets of its micro-batches as one object, reads that of each other replica, and
computes the loss of all; then the backwards begin. A single replica exchanges nothing.

By hand: 4 micro-batches of 30 bytes on 2 replicas, links of 10 bytes/s, 0.1 s of latency. Each puts 60 bytes in 6.1 s,
then reads 60 bytes in 6.1 s: the first backward begins 12.2 s after the last forward. With 4 replicas each puts 30
bytes in 3.1 s, and reads 3 objects of 30 bytes, whose latencies pass side by side, in 9.1 s.
"""

import numpy as np

from funcpipe.partitioner.cost.arrays import Array
from funcpipe.partitioner.cost.loads import Loads, Setting


def joint_times(loads: Loads, setting: Setting, up: Array, down: Array) -> Array:
    """Seconds from the last forward of each stage to its first backward; 0 for all stages but the last."""
    own_bytes, others_bytes = joint_bytes_each(setting)
    if not others_bytes:
        return np.zeros(np.broadcast(loads.is_last, up).shape)
    latency_s = setting.message_store.latency_s
    exchange_s: Array = loads.is_last * (2 * latency_s + own_bytes / up + others_bytes / down)
    return exchange_s


def joint_requests(loads: Loads, setting: Setting) -> tuple[Array, Array]:
    """Puts and gets of outputs by each stage in one iteration, all replicas together."""
    exchanging = loads.is_last * float(setting.joint_bytes is not None and setting.replicas > 1)
    return setting.replicas * exchanging, setting.replicas * (setting.replicas - 1) * exchanging


def joint_bytes_each(setting: Setting) -> tuple[float, float]:
    """Bytes that each replica of the last stage sends to the others, and receives from them."""
    if setting.joint_bytes is None or setting.replicas == 1:
        return 0.0, 0.0
    own_bytes = float(setting.micro_batches_each * setting.joint_bytes)
    return own_bytes, (setting.replicas - 1) * own_bytes


def joint_memory_bytes(loads: Loads, setting: Setting) -> Array:
    """Bytes that a function of each stage holds for the loss: outputs and targets of all micro-batches, as they came
    and as one batch, the gradients of that, and its own message.
    """
    each, all_bytes = setting.micro_batches_each, setting.micro_batches * (setting.joint_bytes or 0.0)
    sent_bytes = each * (setting.joint_bytes or 0.0) if setting.replicas > 1 else 0.0
    total: Array = loads.is_last * (3 * all_bytes + sent_bytes)
    return total
