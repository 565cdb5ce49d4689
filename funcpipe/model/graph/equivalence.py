"""Check that a graph computes what its model does: both run, on other inputs and seeds than those of the tracing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from funcpipe.model.graph.isolation import (
    GENERATORS,
    generator_states,
    preserve_gradients,
    preserve_state,
    without_saved_tensors,
)
from funcpipe.model.graph.observe import NodeRecord, observe
from funcpipe.model.graph.signature import Signature, batch_of
from funcpipe.model.graph.tracers import Traced, flatten_output
from funcpipe.model.seeds import reseed

TOLERANCE = 1e-4
"""The largest difference between a graph's results and the model's that counts as rounding, relative to the largest
element.
"""


@dataclass(frozen=True)
class Observation:
    """The result of a run: the leaves of the output, fingerprints of the random number generators afterwards, the
    buffers it changed, and a digest of each parameter's gradient (None if no backward pass was run).
    """

    leaves: tuple[Any, ...]
    generators: Mapping[str, int]
    buffers: Mapping[str, Tensor]
    gradients: Mapping[str, tuple[float, float]] | None


@dataclass(frozen=True)
class Example:
    """Inputs by name, a seed, and the result of the model itself for them."""

    inputs: Mapping[str, Tensor]
    seed: int
    result: Observation


def example(
    model: nn.Module, signature: Signature, inputs: Mapping[str, Tensor], *, seed: int, backward: bool
) -> Example:
    """Run the model itself on `inputs`: forward and, if `backward`, backward."""

    def forward(given: dict[str, Tensor]) -> list[Any]:
        args, kwargs = signature.arguments(given)
        return flatten_output(model(*args, **kwargs))[0]

    return Example(inputs, seed, _result_of(model, forward, inputs, seed, backward))


def compare(
    traced: Traced, model: nn.Module, examples: Sequence[Example]
) -> tuple[list[dict[str, NodeRecord]], str | None]:
    """Run the graph on `examples`: the records of its nodes for each, and how it differs from the model, if it does."""
    names = {node.meta["input"]: node.name for node in traced.module.graph.nodes if node.op == "placeholder"}
    runs: list[dict[str, NodeRecord]] = []

    def forward(given: dict[str, Tensor]) -> list[Any]:
        records, leaves = observe(traced.module, {names[name]: t for name, t in given.items()}, traced.outputs)
        runs.append(records)
        return leaves

    for one in examples:
        found = _result_of(model, forward, one.inputs, one.seed, one.result.gradients is not None)
        difference = difference_of(found, one.result)
        if difference is not None:
            return runs, f"{difference}, for a batch of {batch_of(one.inputs)}"
    return runs, None


def _result_of(
    model: nn.Module,
    forward: Callable[[dict[str, Tensor]], list[Any]],
    inputs: Mapping[str, Tensor],
    seed: int,
    backward: bool,
) -> Observation:
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    old = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with preserve_state(model), preserve_gradients(model), torch.enable_grad() if backward else without_saved_tensors():
        reseed(seed, GENERATORS)
        leaves = forward(given)
        generators = generator_states()
        buffers = {name: new.clone() for name, new in model.named_buffers() if not _equal(old[name], new)}
        gradients = _digests(model, leaves) if backward else None
    kept = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Observation(kept, generators, buffers, gradients)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether both hold the same, where a NaN equals a NaN."""
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _digests(model: nn.Module, leaves: Sequence[Any]) -> dict[str, tuple[float, float]]:
    """Run backward from `leaves`; return the sum and the absolute sum of each parameter's gradient."""
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
            torch.autograd.backward(roots, [_output_gradients(root) for root in roots])
    finally:
        for handle in handles:
            handle.remove()
    return digests


def _output_gradients(root: Tensor) -> Tensor:
    """Output gradients that are all different, so that no sum hides an error."""
    return torch.cos(torch.arange(root.numel(), dtype=torch.float32)).to(root.dtype).view(root.shape)


def difference_of(found: Observation, expected: Observation) -> str | None:
    """How two runs differ by more than rounding; None if they do not."""
    for name, state in expected.generators.items():
        if found.generators[name] != state:
            return f"it draws other random numbers from {name}'s generator than the model: some were frozen or dropped"
    if len(found.leaves) != len(expected.leaves):
        return f"its output has {len(found.leaves)} parts, the model's {len(expected.leaves)}"
    for i, (one, other) in enumerate(zip(found.leaves, expected.leaves, strict=True)):
        if not _close(one, other):
            return f"part {i} of its output differs from the model's"
    if found.buffers.keys() != expected.buffers.keys():
        return f"it does not change the same buffers: {', '.join(found.buffers.keys() ^ expected.buffers.keys())}"
    for name, tensor in expected.buffers.items():
        if not _close(found.buffers[name], tensor):
            return f"it leaves different values in the buffer {name}"
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
            return f"its gradient for {name} differs from the model's"
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
