"""Whether a graph does what the model does: both run, on other inputs and random numbers than when it was traced."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from funcpipe.model.graph.isolation import gradients_kept, nothing_saved, positions, seed_all, untouched
from funcpipe.model.graph.observe import Seen, observe
from funcpipe.model.graph.signature import Signature, batch_of
from funcpipe.model.graph.tracers import Traced, take_output_apart

TOLERANCE = 1e-4
"""By how much, relative to the largest element, a graph's results may differ from the model's (rounding)."""


@dataclass(frozen=True)
class Observed:
    """What a run gave and did: the leaves of the output, where the random number generators stand, the buffers it
    changed, and a digest of each parameter's gradient (None where no backward was run).
    """

    leaves: tuple[Any, ...]
    generators: Mapping[str, int]
    buffers: Mapping[str, Tensor]
    gradients: Mapping[str, tuple[float, float]] | None


@dataclass(frozen=True)
class Example:
    """Inputs by name, the seed of the random numbers, and what the model makes of them."""

    inputs: Mapping[str, Tensor]
    seed: int
    outcome: Observed


def example(
    model: nn.Module, signature: Signature, inputs: Mapping[str, Tensor], *, seed: int, backward: bool
) -> Example:
    """Run the model itself on `inputs`, forward and, if asked, backward."""

    def forward(given: dict[str, Tensor]) -> list[Any]:
        args, kwargs = signature.arguments(given)
        return take_output_apart(model(*args, **kwargs))[0]

    return Example(inputs, seed, _outcome(model, forward, inputs, seed, backward))


def compare(traced: Traced, model: nn.Module, examples: Sequence[Example]) -> tuple[list[dict[str, Seen]], str | None]:
    """Run the graph on `examples`: what was seen of its nodes, and how it differs from the model, None if it does
    not.
    """
    names = {node.meta["input"]: node.name for node in traced.module.graph.nodes if node.op == "placeholder"}
    runs: list[dict[str, Seen]] = []

    def forward(given: dict[str, Tensor]) -> list[Any]:
        seen, leaves = observe(traced.module, {names[name]: t for name, t in given.items()}, traced.outputs)
        runs.append(seen)
        return leaves

    for one in examples:
        found = _outcome(model, forward, one.inputs, one.seed, one.outcome.gradients is not None)
        difference = difference_of(found, one.outcome)
        if difference is not None:
            return runs, f"{difference}, for a batch of {batch_of(one.inputs)}"
    return runs, None


def _outcome(
    model: nn.Module,
    forward: Callable[[dict[str, Tensor]], list[Any]],
    inputs: Mapping[str, Tensor],
    seed: int,
    backward: bool,
) -> Observed:
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    old = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with untouched(model), gradients_kept(model), torch.enable_grad() if backward else nothing_saved():
        seed_all(seed)
        leaves = forward(given)
        generators = positions()
        buffers = {name: new.clone() for name, new in model.named_buffers() if not _equal(old[name], new)}
        gradients = _digests(model, leaves) if backward else None
    kept = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Observed(kept, generators, buffers, gradients)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether both hold the same, where not-a-number is the same as itself."""
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _digests(model: nn.Module, leaves: Sequence[Any]) -> dict[str, tuple[float, float]]:
    """Run backward from `leaves` and take each parameter's gradient as it is complete: its sum and its absolute sum."""
    digests: dict[str, tuple[float, float]] = {}

    def hook(name: str) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None:
                digests[name] = (float(gradient.double().sum()), float(gradient.double().abs().sum()))
            parameter.grad = None

        return take

    roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    handles: list[Any] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(hook(name)))  # type: ignore[no-untyped-call]
    try:
        if roots:
            torch.autograd.backward(roots, [_weights(root) for root in roots])
    finally:
        for handle in handles:
            handle.remove()
    return digests


def _weights(root: Tensor) -> Tensor:
    """Gradients from behind, all different, so that no sum hides an error."""
    return torch.cos(torch.arange(root.numel(), dtype=torch.float32)).to(root.dtype).view(root.shape)


def difference_of(found: Observed, expected: Observed) -> str | None:
    """How two runs differ; None where they do not, but for rounding."""
    for name, state in expected.generators.items():
        if found.generators[name] != state:
            return (
                f"it draws other numbers from {name}'s generator than the model: some were frozen into it or left out"
            )
    if len(found.leaves) != len(expected.leaves):
        return f"its output has {len(found.leaves)} parts, the model's {len(expected.leaves)}"
    for i, (one, other) in enumerate(zip(found.leaves, expected.leaves, strict=True)):
        if not _close(one, other):
            return f"part {i} of its output is not the model's"
    if found.buffers.keys() != expected.buffers.keys():
        return f"it does not change the same buffers: {', '.join(found.buffers.keys() ^ expected.buffers.keys())}"
    for name, tensor in expected.buffers.items():
        if not _close(found.buffers[name], tensor):
            return f"it leaves other values in the buffer {name}"
    return _gradient_difference(found.gradients or {}, expected.gradients or {})


def _gradient_difference(
    found: Mapping[str, tuple[float, float]], expected: Mapping[str, tuple[float, float]]
) -> str | None:
    largest = max((digest[1] for digest in expected.values()), default=0.0)
    for name in [*found, *expected]:
        if name not in found or name not in expected:
            return f"only {'the model' if name in expected else 'the graph'} has a gradient for {name}"
        (one, _), (other, size) = found[name], expected[name]
        if abs(one - other) > TOLERANCE * max(size, 1e-6 * largest):
            return f"its gradient for {name} is not the model's"
    return None


def _close(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    finite = other[other.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
