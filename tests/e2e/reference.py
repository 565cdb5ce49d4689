"""Plain single-process PyTorch on the same micro-batches: what every run must equal."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core import Streams, Sync
from funcpipe.model.draws import layer_seed
from tests.e2e.int8_sums import Int8Sums

Order = list[Any]
"""Numbers of replicas, and lists of such that are added first."""


def train(
    model: nn.Module,
    dataset: Any,
    *,
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: Sequence[Sequence[Sequence[int]]],
    seed: int = 0,
    clip_grad_norm: float | None = None,
    replicas: int = 1,
    rounded: torch.dtype | None = None,
    int8: Int8Sums | None = None,
    order: Order | None = None,
    device: str = "cpu",
) -> list[float]:
    """Train in place; `steps` holds the sample numbers of each micro-batch of each step. The loss of each step.

    Micro-batch m adds to the gradient of replica m mod `replicas`; these are added in the end. With `rounded`, what
    each contributes is rounded to that dtype before, and so is their sum. `int8` sums in 8 bits instead. They are
    added in `order`, by default one after the other. The model is on `device`.
    """
    model.train()
    chosen = optimizer(model.parameters())
    parameters = list(model.parameters())
    losses = []
    for number, micro_batches in enumerate(steps):
        samples = sum(len(indices) for indices in micro_batches)
        chosen.zero_grad()
        total = 0.0
        gradients: list[list[Tensor | None]] = [[None] * len(parameters) for _ in range(replicas)]
        for m, indices in enumerate(micro_batches):
            items = [dataset[i] for i in indices]
            *inputs, target = (torch.stack([item[k] for item in items]).to(device) for k in range(len(items[0])))
            with drawing_seeded(model, (seed, number, m), device):
                loss = loss_fn(model(*inputs), target)
            torch.autograd.backward(loss * len(indices) / samples)
            total += loss.item() * len(indices) / samples
            add_gradients(gradients[m % replicas], parameters)
        sums = (
            [summed(list(own), rounded, order) for own in zip(*gradients, strict=True)]
            if int8 is None
            else int8(gradients)
        )
        for parameter, total_gradient in zip(parameters, sums, strict=True):
            parameter.grad = total_gradient
        if clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        chosen.step()
        losses.append(total)
    return losses


def add_gradients(gradients: list[Tensor | None], parameters: Sequence[nn.Parameter]) -> None:
    """Move the gradients of `parameters` to the sums of them so far; None where there was none."""
    for i, parameter in enumerate(parameters):
        before, new = gradients[i], parameter.grad
        gradients[i] = new if before is None else before if new is None else before + new
        parameter.grad = None


def order_of(sync: Sync, replicas: int, streams: Streams | None = None) -> Order:
    """The order in which replicas are added, groups in it first.

    In the hierarchical way a group has about the root of their number, which is divided by it. In a tree with a fan-in
    of k, by default 4, replica r adds the sums of k r + 1 to k r + k, where there are such.
    """
    if sync is Sync.TREE:
        return _below(0, replicas, min(streams.groups if streams else 4, max(replicas - 1, 1)))
    size = replicas
    if sync is Sync.HIERARCHICAL:
        size = min(replicas // groups for groups in range(1, math.isqrt(replicas) + 1) if replicas % groups == 0)
    everyone = list(range(replicas))
    return everyone if size == replicas else [everyone[first : first + size] for first in range(0, replicas, size)]


def _below(replica: int, replicas: int, fan_in: int) -> Order:
    children = range(fan_in * replica + 1, min(fan_in * replica + fan_in + 1, replicas))
    orders = [_below(child, replicas, fan_in) for child in children]
    return [replica, *(order[0] if len(order) == 1 else order for order in orders)]


def summed(
    contributions: Sequence[Tensor | None], rounded: torch.dtype | None, order: Order | None = None
) -> Tensor | None:
    """The sum of what replicas contribute, in order, with 32-bit numbers rounded as they are on their way."""
    order = list(range(len(contributions))) if order is None else order
    added = [contributions[one] if isinstance(one, int) else summed(contributions, rounded, one) for one in order]
    present = [values for values in added if values is not None]
    if not present:
        return None

    def sent(values: Tensor) -> Tensor:
        return values if rounded is None or values.dtype is not torch.float32 else values.to(rounded).float() + 0.0

    total = sent(present[0]).clone()
    for values in present[1:]:
        total += sent(values)
    return sent(total)


@contextmanager
def drawing_seeded(model: nn.Module, seed: tuple[int, int, int], device: str = "cpu") -> Iterator[None]:
    """Seed torch before every innermost module, by its name.

    `torch.manual_seed` would format the stack for the GPU that there is not, which takes sixty times as long.
    """

    def seed_for(name: str) -> None:
        if device == "cpu":
            torch.default_generator.manual_seed(layer_seed(*seed, name))
        else:
            torch.get_device_module(device).manual_seed_all(layer_seed(*seed, name))

    handles = [
        module.register_forward_pre_hook(lambda _m, _a, name=name: seed_for(name))
        for name, module in model.named_modules()
        if not any(module.children())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative difference of any tensor: |a - b| / max |b|, in the maximum norm."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, tensor in expected.items():
        difference = (found[name].double() - tensor.double()).abs().max().item()
        worst = max(worst, difference / max(tensor.double().abs().max().item(), 1e-12))
    return worst
