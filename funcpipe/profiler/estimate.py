"""Estimate the seconds and the memory of a layer without timing it: from its operations and bytes, by the roofline of
this machine's processor (`core/accelerator.py`).

Layers without weights are not computed: operators tell the shapes of what they would make, and nothing is in memory.
"""

import functools
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from funcpipe.core import MB, LayerReport, PlatformSpec, Precision
from funcpipe.core.accelerator import Accelerator, Work
from funcpipe.model.split import StageModule
from funcpipe.model.tensors import one_thread, tensors_in
from funcpipe.platforms.process import usable_memory_bytes
from funcpipe.profiler.measure import Loss, Measure, Timing, Trial, faster, work_of

_SIZE, _TRIES = 768, 3


def estimator(spec: PlatformSpec) -> Measure:
    """Estimate layers by the rates of this machine's processor, and divide by the vCPUs of each size of `spec`."""

    def measure(stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None, repeats: int) -> Timing:
        found = estimated(stage, values, loss)
        return lambda: [faster(found, size.vcpu) for size in spec.sizes]

    return measure


def estimated(stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None) -> LayerReport:
    """What a layer takes on one processor of this machine, forward and backward, by its operations and bytes."""
    works = work_of(Trial(stage, values, loss))  # after which there are gradients to add to, as in training
    trial = Trial(stage, values, loss)
    with LiveBytes() as forward:
        trial.forward()
    kept_bytes = forward.bytes()
    trial.make_output_gradients()
    with LiveBytes() as backward:
        trial.backward()
    dtype = next((tensor.dtype for tensor in stage.parameters() if tensor.is_floating_point()), torch.float32)
    return LayerReport(
        forward_s=(_seconds(works[0], dtype),),
        backward_s=(_seconds(works[1], dtype),),
        workspace_bytes=max(forward.peak_bytes - kept_bytes, backward.peak_bytes - backward.bytes()),
        forward_work=works[0],
        backward_work=works[1],
    )


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the bytes of what operators make within its context, for as long as it is held."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._made: dict[int, tuple[Any, int]] = {}  # by the identity of storages: a weak reference, the bytes

    def bytes(self) -> int:
        """The bytes of what is still held."""
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        return sum(size for _, size in self._made.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self.peak_bytes = max(self.peak_bytes, self.bytes())
        return result


def _seconds(work: Work, dtype: torch.dtype) -> float:
    found = processor(dtype).seconds(work, Precision.FP32)
    assert found is not None
    return found


@functools.cache
def processor(dtype: torch.dtype) -> Accelerator:
    """One processor of this machine, as a device whose rates for products and sums of `dtype` were measured here."""
    one = torch.ones(_SIZE, _SIZE, dtype=dtype)
    flat = torch.ones(1 << 23, dtype=dtype)
    with one_thread(), torch.no_grad():
        product_s = min(_processor_seconds(lambda: one @ one) for _ in range(_TRIES))
        sum_s = min(_processor_seconds(lambda: flat + flat) for _ in range(_TRIES))
    return Accelerator.measured(
        "processor",
        flop_s=2 * _SIZE**3 / product_s,
        bytes_s=3 * flat.nbytes / sum_s,
        memory_mb=usable_memory_bytes() // MB,
    )


def _processor_seconds(compute: Any) -> float:
    """The seconds of this thread's processor: other processes, which the machine may be full of, do not count."""
    began_s = time.thread_time()
    compute()
    return max(time.thread_time() - began_s, 1e-9)
