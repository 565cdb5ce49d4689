"""One layer at a time: what its forward and backward take, and what it keeps between them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpipe.core import PlatformSpec
from funcpipe.graph.tree import take_apart
from funcpipe.profiler.live import live_bytes
from funcpipe.split import StageModule

Loss = Callable[[Any], Tensor]


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

    The gradients that come from the layers behind are ones. Gradients are added to the parameters as in training.
    """
    _forward_backward(stage, values, loss, _plainly)
    peaks: list[int] = []

    def watched(compute: Callable[[], Any]) -> Any:
        result, peak, end = live_bytes(compute)
        peaks.append(peak - max(end, 0))
        return result

    _forward_backward(stage, values, loss, watched)
    seconds: list[float] = []

    def timed(compute: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = compute()
        seconds.append(time.perf_counter() - start)
        return result

    for _ in range(repeats):
        _forward_backward(stage, values, loss, timed)
    return Times(tuple(seconds[::2]), tuple(seconds[1::2]), max(peaks))


def _plainly(compute: Callable[[], Any]) -> Any:
    return compute()


def _forward_backward(
    stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None, do: Callable[[Callable[[], Any]], Any]
) -> None:
    """A forward and a backward of a layer, each done by `do`."""
    given = _leaves(stage, values)

    def forward() -> list[Any]:
        sent, output = stage(given)
        return [*sent.values(), *take_apart(loss(output) if loss is not None and stage.is_last else output)[0]]

    with torch.enable_grad():
        made = do(forward)
    roots = [tensor for tensor in made if isinstance(tensor, Tensor) and tensor.requires_grad]
    gradients = [torch.ones_like(root) for root in roots]

    def backward() -> None:
        if roots:
            torch.autograd.backward(roots, gradients)

    do(backward)


def _leaves(stage: StageModule, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    given = {name: values[name] for name in stage.inputs}
    for name in stage.receives:
        given[name] = values[name].detach().requires_grad_(name in stage.differentiable)
    return given
