"""Plain single-process PyTorch on the same micro-batches: what every run must equal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.model.seeds import layer_seed


def train(
    model: nn.Module,
    dataset: Any,
    *,
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: Sequence[Sequence[Sequence[int]]],
    seed: int = 0,
    clip_grad_norm: float | None = None,
) -> list[float]:
    """Train in place; `steps` holds the sample numbers of each micro-batch of each step. The loss of each step."""
    model.train()
    chosen = optimizer(model.parameters())
    losses = []
    for number, micro_batches in enumerate(steps):
        samples = sum(len(indices) for indices in micro_batches)
        chosen.zero_grad()
        total = 0.0
        for m, indices in enumerate(micro_batches):
            items = [dataset[i] for i in indices]
            *inputs, target = (torch.stack([item[k] for item in items]) for k in range(len(items[0])))
            with drawing_seeded(model, (seed, number, m)):
                loss = loss_fn(model(*inputs), target)
            torch.autograd.backward(loss * len(indices) / samples)
            total += loss.item() * len(indices) / samples
        if clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        chosen.step()
        losses.append(total)
    return losses


@contextmanager
def drawing_seeded(model: nn.Module, seed: tuple[int, int, int]) -> Iterator[None]:
    """Seed torch before every innermost module, by its name."""
    handles = [
        module.register_forward_pre_hook(lambda _m, _a, name=name: torch.manual_seed(layer_seed(*seed, name)) and None)
        for name, module in model.named_modules()
        if not any(module.children())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference of any tensor: |a - b| / max |b|, in the maximum norm."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, tensor in expected.items():
        difference = (found[name].double() - tensor.double()).abs().max().item()
        worst = max(worst, difference / max(tensor.double().abs().max().item(), 1e-12))
    return worst
