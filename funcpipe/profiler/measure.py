"""Measure one layer: the time of its forward and backward passes, and the memory it keeps between them."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpipe.core import PlatformSpec
from funcpipe.model.split import StageModule
from funcpipe.model.tensors import flatten
from funcpipe.profiler.live import live_bytes

Loss = Callable[[Any], Tensor]

_CACHE_BYTES = 32 << 20  # more than a core keeps for itself


@dataclass(frozen=True)
class LayerRun:
    """A forward pass of a layer: the tensors it sends, the storages it saves for backward (address to bytes), and the
    bytes of the model's output, if it makes that.
    """

    sent: Mapping[str, Tensor]
    saved: Mapping[int, int]
    output_bytes: int = 0


@dataclass(frozen=True)
class Times:
    """Seconds of each timed forward and backward pass, and the bytes that the layer needs only while it runs."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    workspace_bytes: int

    def faster(self, factor: float) -> "Times":
        """Return the times on a machine that is `factor` times as fast."""
        forward_s, backward_s = (tuple(s / factor for s in kind) for kind in (self.forward_s, self.backward_s))
        return Times(forward_s, backward_s, self.workspace_bytes)


Timing = Callable[[], Sequence[Times]]
"""Returns a layer's times for each size of a platform; call it when all layers have been passed to the Measure."""

Measure = Callable[[StageModule, Mapping[str, Tensor], Loss | None, int], Timing]
"""Takes a layer, its values, the last layer's loss and the repeats; measures at once or when the Timing is called."""


def run_layer(stage: StageModule, values: Mapping[str, Tensor]) -> LayerRun:
    """Run a layer forward once on `values`."""
    constant = {tensor.untyped_storage().data_ptr() for tensor in (*stage.parameters(), *stage.buffers())}
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in constant:
            saved[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor.detach())
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sent, output = stage(_leaves(stage, values))
    output_bytes = sum(leaf.nbytes for leaf in flatten(output)[0] if isinstance(leaf, Tensor))
    return LayerRun({name: tensor.detach() for name, tensor in sent.items()}, saved, output_bytes)


def local_timer(spec: PlatformSpec) -> Measure:
    """Measure layers in this process, and divide by the vCPUs of each size of `spec`."""

    def measure(stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None, repeats: int) -> Timing:
        here = measure_here(stage, values, loss, repeats)
        return lambda: [here.faster(size.vcpu) for size in spec.sizes]

    return measure


def measure_here(stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None, repeats: int) -> Times:
    """Time a layer in this process: one run to warm up, one to measure memory, then `repeats` timed ones.

    Output gradients are ones. As in training, gradients are accumulated in the parameters, and several forward passes
    precede their backward passes, so that the tensors they saved have left the processor's cache.
    """
    for _ in range(2):
        trial = _Trial(stage, values, loss)
        _, forward_peak, kept = live_bytes(trial.forward)
        trial.make_output_gradients()
        _, backward_peak, left = live_bytes(trial.backward)
    workspace = max(forward_peak - max(kept, 0), backward_peak - max(left, 0))
    forward_s: list[float] = []
    backward_s: list[float] = []
    in_flight = min(repeats, 1 + _CACHE_BYTES // max(kept, 1))
    trials: deque[_Trial] = deque()
    while len(forward_s) < repeats:
        for _ in range(min(in_flight, repeats - len(forward_s))):
            trials.append(_Trial(stage, values, loss))
            forward_s.append(_seconds(trials[-1].forward))
        while trials:
            trials[0].make_output_gradients()
            backward_s.append(_seconds(trials.popleft().backward))
    return Times(tuple(forward_s), tuple(backward_s), workspace)


class _Trial:
    """One forward and backward pass of a layer: `forward`, `make_output_gradients`, `backward`, in this order."""

    def __init__(self, stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None) -> None:
        self._stage = stage
        self._loss = loss if stage.is_last else None
        self._given = _leaves(stage, {**values, **{name: values[name].clone() for name in stage.receives}})

    def forward(self) -> None:
        """Run the layer, and keep its results and what it saves."""
        with torch.enable_grad():
            sent, output = self._stage(self._given)
            end = output if self._loss is None else self._loss(output)
            self._results = [*sent.values(), *flatten(end)[0]]

    def make_output_gradients(self) -> None:
        """Make the gradients that the backward pass starts from."""
        self._roots = [result for result in self._results if isinstance(result, Tensor) and result.requires_grad]
        self._gradients = [torch.ones_like(root) for root in self._roots]

    def backward(self) -> None:
        """Run the backward pass, which frees what the forward pass saved."""
        if self._roots:
            torch.autograd.backward(self._roots, self._gradients)


def _seconds(compute: Callable[[], None]) -> float:
    start = time.perf_counter()
    compute()
    return time.perf_counter() - start


def _leaves(stage: StageModule, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    given = {name: values[name] for name in stage.inputs}
    for name in stage.receives:
        given[name] = values[name].detach().requires_grad_(name in stage.differentiable)
    return given
