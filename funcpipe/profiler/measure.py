"""One layer at a time: what its forward and backward take, and what it keeps between them."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpipe.core import PlatformSpec
from funcpipe.model.graph.tree import take_apart
from funcpipe.model.split import StageModule
from funcpipe.profiler.live import live_bytes

Loss = Callable[[Any], Tensor]

_CACHE_BYTES = 32 << 20  # more than a core keeps for itself


@dataclass(frozen=True)
class Run:
    """One forward of a layer: the tensors it sent, and the storages it saved for its backward (address to bytes)."""

    sent: Mapping[str, Tensor]
    saved: Mapping[int, int]


@dataclass(frozen=True)
class Times:
    """Seconds of each forward and backward that was timed, and the bytes that the layer needs only while it runs."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    workspace_bytes: int

    def faster(self, factor: float) -> "Times":
        """On a machine that is so many times faster."""
        forward_s, backward_s = (tuple(s / factor for s in kind) for kind in (self.forward_s, self.backward_s))
        return Times(forward_s, backward_s, self.workspace_bytes)


Timing = Callable[[], Sequence[Times]]
"""What a layer takes in each of a platform's sizes; may be asked when all layers have been given to be measured."""

Measure = Callable[[StageModule, Mapping[str, Tensor], Loss | None, int], Timing]
"""Measures a layer on given values, with a loss if it is the last, so many times: now or when the Timing is asked."""


def run_layer(stage: StageModule, values: Mapping[str, Tensor]) -> Run:
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
        sent, _ = stage(_leaves(stage, values))
    return Run({name: tensor.detach() for name, tensor in sent.items()}, saved)


def on_this_machine(spec: PlatformSpec) -> Measure:
    """Measure layers in this process, and divide by the vCPUs of each of the sizes of `spec`."""

    def measure(stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None, repeats: int) -> Timing:
        here = measure_here(stage, values, loss, repeats)
        return lambda: [here.faster(size.vcpu) for size in spec.sizes]

    return measure


def measure_here(stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None, repeats: int) -> Times:
    """Time a layer in this process: one run is dropped, one tells the memory, `repeats` are timed.

    The gradients that come from the layers behind are ones. Gradients are added to the parameters as in training, and
    as there several forwards come before their backwards, so that what they saved has left the processor's cache.
    """
    for _ in range(2):
        trial = _Trial(stage, values, loss)
        _, forward_peak, kept = live_bytes(trial.forward)
        trial.turn()
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
            trials[0].turn()
            backward_s.append(_seconds(trials.popleft().backward))
    return Times(tuple(forward_s), tuple(backward_s), workspace)


class _Trial:
    """A forward of a layer, and its backward: `forward`, `turn`, `backward`."""

    def __init__(self, stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None) -> None:
        self._stage = stage
        self._loss = loss if stage.is_last else None
        self._given = _leaves(stage, {**values, **{name: values[name].clone() for name in stage.receives}})

    def forward(self) -> None:
        """Run the layer; what it makes and saves is kept."""
        with torch.enable_grad():
            sent, output = self._stage(self._given)
            end = output if self._loss is None else self._loss(output)
            self._made = [*sent.values(), *take_apart(end)[0]]

    def turn(self) -> None:
        """Make the gradients that the backward begins with."""
        self._roots = [made for made in self._made if isinstance(made, Tensor) and made.requires_grad]
        self._gradients = [torch.ones_like(root) for root in self._roots]

    def backward(self) -> None:
        """Run the backward, which frees what the forward saved."""
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
