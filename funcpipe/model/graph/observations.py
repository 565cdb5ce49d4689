"""What a run of a model or of its graph results in, and how two such results differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from funcpipe.model.graph.python_state import State

TOLERANCE = 1e-4
"""The largest difference between a graph's results and the model's that counts as rounding, relative to the largest
element.
"""


@dataclass(frozen=True)
class Observation:
    """The result of a run: the leaves of the output, fingerprints of the random number generators afterwards, the
    buffers it changed, and a digest of each parameter's gradient (None if no backward pass was run).

    `written` are the buffers that it wrote to in place, even if they hold the same afterwards. `states` are the values
    of the model's attributes after the forward and after the backward, where they were read. `late` are the buffers
    that the backward pass changed.
    """

    leaves: tuple[Any, ...]
    generators: Mapping[str, int]
    buffers: Mapping[str, Tensor]
    gradients: Mapping[str, tuple[float, float]] | None
    written: frozenset[str] = frozenset()
    states: tuple[State, ...] = ()
    late: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """How two runs differ by more than rounding, in words; `buffers` are those that only one of them changes."""

    text: str
    buffers: tuple[str, ...] = ()


def difference_of(found: Observation, expected: Observation) -> Difference | None:
    """How two runs differ; None if they do not by more than rounding."""
    if text := _result_difference(found, expected):
        return Difference(text)
    if found.buffers.keys() != expected.buffers.keys():
        names = tuple(sorted(found.buffers.keys() ^ expected.buffers.keys()))
        return Difference(f"it does not change the same buffers: {', '.join(names)}", names)
    for name, tensor in expected.buffers.items():
        if not _close(found.buffers[name], tensor):
            return Difference(f"it leaves different values in the buffer {name}")
    text = _gradient_difference(found.gradients or {}, expected.gradients or {})
    return None if text is None else Difference(text)


def _result_difference(found: Observation, expected: Observation) -> str | None:
    for name, state in expected.generators.items():
        if found.generators[name] != state:
            return f"it draws other random numbers from {name}'s generator than the model: some were frozen or dropped"
    if len(found.leaves) != len(expected.leaves):
        return f"its output has {len(found.leaves)} parts, the model's {len(expected.leaves)}"
    for i, (one, other) in enumerate(zip(found.leaves, expected.leaves, strict=True)):
        if not _close(one, other):
            return f"part {i} of its output differs from the model's"
    return None


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
