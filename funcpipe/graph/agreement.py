"""Whether a graph does what the model does: both run, on other inputs and random numbers than when it was traced."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from funcpipe.graph.program import compile_nodes, plain, resolve, run
from funcpipe.graph.quiet import gradients_kept, positions, seed_all, untouched
from funcpipe.graph.routes import Traced, take_output_apart
from funcpipe.graph.signature import Signature

TOLERANCE = 1e-4
"""By how much, relative to the largest element, a graph's results may differ from the model's (rounding)."""


@dataclass(frozen=True)
class Outcome:
    """What a run gave: the leaves of the output, a digest of each parameter's gradient, where the generators stand."""

    leaves: tuple[Any, ...]
    gradients: Mapping[str, tuple[float, float] | None]
    generators: Mapping[str, Any]


@dataclass(frozen=True)
class Example:
    """Inputs by name, the seed of the random numbers, and what the model makes of them."""

    inputs: Mapping[str, Tensor]
    seed: int
    outcome: Outcome


def example(model: nn.Module, signature: Signature, inputs: Mapping[str, Tensor], seed: int) -> Example:
    """Run the model itself on `inputs`, forward and backward."""

    def forward(given: dict[str, Tensor]) -> list[Any]:
        args, kwargs = signature.arguments(given)
        return take_output_apart(model(*args, **kwargs))[0]

    return Example(inputs, seed, _outcome(model, forward, inputs, seed))


def disagreement(traced: Traced, model: nn.Module, examples: list[Example]) -> str | None:
    """How the graph's results differ from the model's on `examples`; None where they are the same."""
    nodes = [node for node in traced.module.graph.nodes if node.op not in ("placeholder", "output")]
    names = {node.meta["input"]: node.name for node in traced.module.graph.nodes if node.op == "placeholder"}
    kept = {node.name for node in traced.outputs if isinstance(node, torch.fx.Node)}
    calls = compile_nodes(nodes, kept | set(names.values()))

    def forward(given: dict[str, Tensor]) -> list[Any]:
        env: dict[str, Any] = {names[name]: tensor for name, tensor in given.items()}
        run(calls, env, traced.module)
        return list(resolve(list(plain(traced.outputs)), env))

    for one in examples:
        found = _outcome(model, forward, one.inputs, one.seed)
        difference = difference_of(found, one.outcome)
        if difference is not None:
            return f"{difference} (batch of {next(iter(one.inputs.values())).shape[:1]}, seed {one.seed})"
    return None


def _outcome(
    model: nn.Module, forward: Callable[[dict[str, Tensor]], list[Any]], inputs: Mapping[str, Tensor], seed: int
) -> Outcome:
    given = {name: tensor.clone() for name, tensor in inputs.items()}
    with untouched(model), gradients_kept(model), torch.enable_grad(), _digests(model) as gradients:
        seed_all(seed)
        leaves = forward(given)
        generators = positions()
        roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if roots:
            torch.autograd.backward(roots, [_weights(root) for root in roots])
    kept = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Outcome(kept, dict(gradients), generators)


def _weights(root: Tensor) -> Tensor:
    """Gradients from behind, all different, so that no sum hides an error."""
    return torch.cos(torch.arange(root.numel(), dtype=torch.float32)).to(root.dtype).view(root.shape)


@contextmanager
def _digests(model: nn.Module) -> Iterator[dict[str, tuple[float, float]]]:
    """Take each parameter's gradient as it is complete: its sum and its absolute sum."""
    digests: dict[str, tuple[float, float]] = {}

    def hook(name: str) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None:
                digests[name] = (float(gradient.double().sum()), float(gradient.double().abs().sum()))
            parameter.grad = None

        return take

    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    handles: list[Any] = []
    for name, parameter in named:
        handles.append(parameter.register_post_accumulate_grad_hook(hook(name)))  # type: ignore[no-untyped-call]
    try:
        yield digests
    finally:
        for handle in handles:
            handle.remove()


def difference_of(found: Outcome, expected: Outcome) -> str | None:
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
    for name in found.gradients.keys() | expected.gradients.keys():
        one, other = found.gradients.get(name), expected.gradients.get(name)
        if one is None or other is None:
            with_one = "the graph" if other is None else "the model"
            return f"only {with_one} has a gradient for {name}"
        if abs(one[0] - other[0]) > TOLERANCE * max(abs(other[1]), 1e-12):
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
