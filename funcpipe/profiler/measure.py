"""One layer at a time: what its forward and backward take, and what it keeps between them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpipe.graph.tree import take_apart
from funcpipe.split import StageModule


@dataclass(frozen=True)
class Run:
    """One forward and backward of a layer: seconds, the tensors it sent, and the storages it saved (address to
    bytes).
    """

    forward_s: float
    backward_s: float
    sent: Mapping[str, Tensor]
    saved: Mapping[int, int]


def run_layer(stage: StageModule, values: Mapping[str, Tensor], loss: Callable[[Any], Tensor] | None) -> Run:
    """Run a layer forward and backward once on `values`; `loss`, if the layer is the last, turns its output into a
    number.

    Gradients are added to the parameters as in training. Gradients of ones come from the layers behind.
    """
    given = {name: values[name] for name in stage.inputs}
    for name in stage.receives:
        given[name] = values[name].detach().requires_grad_(name in stage.differentiable)
    constant = {tensor.untyped_storage().data_ptr() for tensor in (*stage.parameters(), *stage.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in constant:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        start = time.perf_counter()
        sent, output = stage(given)
        ends = loss(output) if loss is not None and stage.is_last else output
        forward_s = time.perf_counter() - start
    roots = [tensor for tensor in (*sent.values(), *take_apart(ends)[0]) if _needs_gradient(tensor)]
    gradients = [torch.ones_like(root) for root in roots]
    kept = {name: tensor.detach() for name, tensor in sent.items()}
    start = time.perf_counter()
    if roots:
        torch.autograd.backward(roots, gradients)
    return Run(forward_s, time.perf_counter() - start, kept, saved)


def _needs_gradient(item: Any) -> bool:
    return isinstance(item, Tensor) and item.requires_grad
