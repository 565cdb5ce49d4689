"""Does a plan train a model as one process would? Both train for a few steps, and each tensor is compared.

The one process trains on whole global batches, as a user's script does. Where that differs, because the model draws
random numbers, or BatchNorm or the loss couples the samples of a batch, it accumulates the gradients of micro-batches.

A tensor's difference is measured by how far training has moved it, so that a gradient that is wrong by a hundredth
shows however short the training was. Where that is more than the tolerance, plain training from weights that are off by
their last digit shows what rounding explains. Some gradients are nothing but rounding: a bias ahead of BatchNorm and
the bias of attention's keys change no loss. Adam makes full steps of them, in directions that mean nothing.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.isolation import in_turn
from funcpipe.training.plain import PlainRun, PlainTraining

TOLERANCE = 1e-4
"""Largest difference, relative to the change by training, at which tensors count as equal."""

_RUNS = 5  # plain runs that show what rounding explains
_FACTOR = 4.0  # how much more than in those a difference by rounding may be
_NO_DIGITS = 0.1  # a gradient that rounding changes by this share says nothing


class Yardstick(Enum):
    """The yardstick of a tensor: the tolerance, or the effect of rounding on plain training."""

    TOLERANCE = "tolerance"
    ROUNDING = "rounding"


class Reference(Enum):
    """The way to compute a step's gradient in one process: from the whole global batch, or by micro-batches; or by
    replicas that train alone, one after the other.
    """

    WHOLE = "whole batches"
    ACCUMULATED = "accumulated micro-batches"
    LOCAL = "local steps, one replica after the other"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One tensor of the model's state; `difference` is that of the worst element, `allowed` what it may be.

    Both are relative to the largest change that training made to any element, or to the largest element if it made
    none. Without `allowed` it is the tolerance.
    """

    name: str
    layer: str
    difference: float
    allowed: float | None = None
    yardstick: Yardstick = Yardstick.TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The model's state after `steps` steps on functions, compared with one process's; `tensors` in order of layers.

    `reference` is what that process did. If it accumulated micro-batches, `off_whole` is the first tensor that differs
    from training on whole batches; None if that was not tried, as the model draws random numbers.
    """

    FORMAT: ClassVar[str] = "funcpipe.verification/1"

    steps: int
    tolerance: float
    tensors: tuple[TensorDifference, ...]
    reference: Reference = Reference.ACCUMULATED
    off_whole: TensorDifference | None = None

    @property
    def agrees(self) -> bool:
        """True if every tensor agrees."""
        return self.first_difference is None

    @property
    def first_difference(self) -> TensorDifference | None:
        """The first tensor, by layer, that differs."""
        return next((tensor for tensor in self.tensors if not self.accepts(tensor)), None)

    def accepts(self, tensor: TensorDifference) -> bool:
        """Return True if `tensor` differs by no more than it may."""
        return tensor.difference <= self.allowed(tensor)

    def allowed(self, tensor: TensorDifference) -> float:
        """Return the largest difference at which `tensor` counts as equal."""
        return self.tolerance if tensor.allowed is None else tensor.allowed


def compare_states(
    graph: LayerGraph,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    steps: int,
    tolerance: float = TOLERANCE,
    start: Mapping[str, Tensor] | None = None,
) -> Verification:
    """Compare the state `found` after a run with the `expected` one of a single process; both began with `start`."""
    layer_of = {name: layer.name for layer in reversed(graph.layers) for name in graph.tensors_of(layer)}
    rank = {layer.name: i for i, layer in enumerate(graph.layers)}
    tensors = []
    for name in sorted(expected, key=lambda name: rank.get(layer_of.get(name, ""), len(rank))):
        before = None if start is None else start[name]
        difference = _excess(found[name], expected[name], steps) / _scale(expected[name], before)
        layer = layer_of.get(name, "outside the graph")
        tensors.append(TensorDifference(name=name, layer=layer, difference=_largest(difference)))
    return Verification(steps=steps, tolerance=tolerance, tensors=tuple(tensors))


@in_turn()
def verify_run(found: Mapping[str, Tensor], plain: PlainTraining, *, steps: int, tolerance: float) -> Verification:
    """Compare the state `found` after a run with that of plain training: on whole batches, or, where that differs, with
    accumulated micro-batches; of replicas that train alone, with the same algorithm in one process.
    """
    off_whole = None
    if plain.can_be_whole:
        run = replace(plain, whole=True).run
        verification = verify_states(plain.graph, found, run, steps=steps, tolerance=tolerance)
        if verification.agrees:
            return replace(verification, reference=Reference.WHOLE)
        off_whole = verification.first_difference
    verification = verify_states(plain.graph, found, plain.run, steps=steps, tolerance=tolerance)
    reference = Reference.ACCUMULATED if plain.local is None else Reference.LOCAL
    return replace(verification, reference=reference, off_whole=off_whole)


def verify_states(
    graph: LayerGraph,
    found: Mapping[str, Tensor],
    plain: "Plain",
    *,
    steps: int,
    tolerance: float = TOLERANCE,
) -> Verification:
    """Compare the state `found` after a run with that of plain training.

    What exceeds the tolerance is judged by what rounding explains, in more plain runs.
    """
    expected = plain(0)
    verification = compare_states(graph, found, expected.end, steps=steps, tolerance=tolerance, start=expected.start)
    if verification.agrees:
        return verification
    names = [tensor.name for tensor in verification.tensors if not verification.accepts(tensor)]
    expected, *others = (plain(number, names) for number in range(_RUNS + 1))
    return Verification(
        steps=steps,
        tolerance=tolerance,
        tensors=tuple(
            tensor if verification.accepts(tensor) else _by_rounding(tensor, found, expected, others, verification)
            for tensor in verification.tensors
        ),
    )


class Plain(Protocol):
    """Plain training: run 0 as it is, others from weights that are off by rounding.

    Given `names`, a run keeps those tensors only, but their gradients too.
    """

    def __call__(self, number: int, names: Collection[str] | None = None) -> PlainRun:
        """Run `number`."""


def _by_rounding(
    tensor: TensorDifference,
    found: Mapping[str, Tensor],
    expected: PlainRun,
    others: Sequence[PlainRun],
    verification: Verification,
) -> TensorDifference:
    """Return `tensor` judged by its worst element, relative to what rounding does to it in the plain runs `others`."""
    name = tensor.name
    scale = _scale(expected.end[name], expected.start[name])
    excess = _excess(found[name], expected.end[name], verification.steps)
    change = _change(expected, name)
    changes = [_change(other, name) for other in others]
    noise = torch.stack([(other - change).abs() for other in changes]).amax(0)
    reach = torch.stack([change.abs(), *(other.abs() for other in changes)]).amax(0)
    blind = _without_digits(expected, others, name)
    blind = torch.zeros_like(excess, dtype=torch.bool) if blind is None else blind
    allowed = torch.full_like(excess, verification.tolerance * scale)
    for part, explained in ((~blind, noise), (blind, reach)):
        if part.any():
            allowed[part] = allowed[part].clamp(min=_FACTOR * float(explained[part].max()))
    worst = (excess / allowed).argmax()
    return TensorDifference(
        name=name,
        layer=tensor.layer,
        difference=_largest(excess[worst] / scale),
        allowed=_largest(allowed[worst] / scale),
        yardstick=Yardstick.ROUNDING,
    )


def _without_digits(expected: PlainRun, others: Sequence[PlainRun], name: str) -> Tensor | None:
    """Return the elements whose gradient is nothing but rounding in some step; None for a tensor without a gradient."""
    blind: Tensor | None = None
    for number, gradients in enumerate(expected.gradients):
        for other in others:
            if name in gradients and name in other.gradients[number]:
                one, two = _plain(gradients[name]), _plain(other.gradients[number][name])
                lost = (one - two).abs() > _NO_DIGITS * one.abs()
                blind = lost if blind is None else blind | lost
    return blind


def _change(run: PlainRun, name: str) -> Tensor:
    return _plain(run.end[name]) - _plain(run.start[name])


def _scale(expected: Tensor, start: Tensor | None) -> float:
    """Return the largest change of any element, or the largest element; never zero."""
    end = _plain(expected)
    change = 0.0 if start is None else _largest((end - _plain(start)).abs())
    return change or _largest(end.abs()) or torch.finfo(torch.float32).tiny


def _excess(found: Tensor, expected: Tensor, steps: int) -> Tensor:
    """Return how far each element differs, beyond the last digit that each step may round another way."""
    one, other = _plain(found), _plain(expected)
    difference = (one - other).abs()
    if expected.is_floating_point() or expected.is_complex():
        difference = (difference - steps * torch.finfo(expected.dtype).eps * other.abs()).clamp(min=0)
    return torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, difference)


def _plain(tensor: Tensor) -> Tensor:
    """Return the elements as a vector of doubles, complex ones as two each."""
    tensor = tensor.detach()
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.reshape(-1).double()


def _largest(tensor: Tensor) -> float:
    """Return the largest element, as a number that JSON can hold."""
    largest = float(tensor.max()) if tensor.numel() else 0.0
    return largest if largest <= sys.float_info.max else sys.float_info.max
