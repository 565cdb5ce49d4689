"""Stages run one after another in one process: what a pipelined run must equal, without storage between.

As on the wire, what a stage receives is contiguous and shares no memory with what was sent.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.model.split import StageModule


def run_chain(
    stages: Sequence[StageModule],
    inputs: Mapping[str, Tensor],
    loss: Callable[[Any], Tensor],
    seed: tuple[int, int, int] | None = None,
) -> Any:
    """The model's output; adds the gradients of `loss` of it to the stages' parameters."""
    values = {name: tensor.clone() for name, tensor in inputs.items()}
    received, sent, output = [], [], None
    for stage in stages:
        leaves = {name: values[name].detach().clone(memory_format=torch.contiguous_format) for name in stage.receives}
        for name in stage.differentiable & leaves.keys():
            leaves[name].requires_grad_()
        made, output = stage({**{name: inputs[name] for name in stage.inputs}, **leaves}, seed)
        values |= made
        received.append(leaves)
        sent.append(made)
    gradients: dict[str, Tensor] = {}
    for stage, leaves, made in zip(reversed(stages), reversed(received), reversed(sent), strict=True):
        roots: list[Tensor] = [loss(output)] if stage.is_last else []
        seeds: list[Tensor | None] = [None] if stage.is_last else []
        for name in made.keys() & gradients.keys():
            roots.append(made[name])
            seeds.append(gradients[name])
        pairs = [(root, given) for root, given in zip(roots, seeds, strict=True) if root.requires_grad]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [given for _, given in pairs])
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad
    return output


def take_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients of `model` by parameter name, which are reset."""
    taken = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return taken


def assert_same(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], tolerance: float = 0.0
) -> None:
    """Every tensor of the one equals its namesake of the other, relative to the largest element."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        other = found[name]
        if tensor is None or other is None:
            assert tensor is other, name
            continue
        torch.testing.assert_close(other, tensor, rtol=tolerance, atol=tolerance * float(tensor.abs().max()), msg=name)


def even_bounds(layers: int, stages: int) -> list[tuple[int, int]]:
    """`layers` in so many stages of nearly equal length."""
    ends = [round(layers * i / stages) for i in range(stages + 1)]
    return list(pairwise(ends))
