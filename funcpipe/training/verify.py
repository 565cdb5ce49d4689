"""Does a plan train a model as one process would? Both train for a few steps, and each tensor is compared."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from funcpipe.model.graph import LayerGraph
from funcpipe.training.data import MapDataset, Step, load_batch
from funcpipe.training.passes import LossFunction
from funcpipe.training.rng import SeededDataset, seeded
from funcpipe.training.stage_optimizer import OptimizerFactory

TOLERANCE = 1e-4
"""Largest relative difference at which tensors count as equal: rounding, amplified over a few steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One tensor of the model's state; `difference` is the largest of any element, relative to the largest element."""

    name: str
    layer: str
    difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The model's state after `steps` steps on functions, compared with one process's; `tensors` in order of layers."""

    FORMAT: ClassVar[str] = "funcpipe.verification/1"

    steps: int
    tolerance: float
    tensors: tuple[TensorDifference, ...]

    @property
    def agrees(self) -> bool:
        """Whether every tensor agrees within the tolerance."""
        return self.first_difference is None

    @property
    def first_difference(self) -> TensorDifference | None:
        """The first tensor, by layer, whose difference exceeds the tolerance or is NaN."""
        return next((tensor for tensor in self.tensors if not tensor.difference <= self.tolerance), None)


def compare_states(
    graph: LayerGraph,
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    *,
    steps: int,
    tolerance: float = TOLERANCE,
) -> Verification:
    """Compare the state `found` after a run with the `expected` one of a single process."""
    layer_of = {name: layer.name for layer in reversed(graph.layers) for name in graph.tensors_of(layer)}
    rank = {layer.name: i for i, layer in enumerate(graph.layers)}
    names = sorted(expected, key=lambda name: rank.get(layer_of.get(name, ""), len(rank)))
    return Verification(
        steps=steps,
        tolerance=tolerance,
        tensors=tuple(
            TensorDifference(
                name=name,
                layer=layer_of.get(name, "outside the graph"),
                difference=_relative_difference(found[name], expected[name]),
            )
            for name in names
        ),
    )


def train_in_one_process(
    model: nn.Module,
    graph: LayerGraph,
    dataset: MapDataset,
    steps: Sequence[Step],
    *,
    loss: LossFunction,
    optimizer: OptimizerFactory,
    seed: int,
    clip_grad_norm: float | None = None,
    reverse: bool = False,
) -> nn.Module:
    """A copy of `model` trained by plain PyTorch on the same micro-batches, drawing the same random numbers.

    With `reverse`, gradients are added up from the last micro-batch to the first, which shows the effect of rounding.
    """
    trained = copy.deepcopy(model).train()
    chosen = optimizer(trained.parameters())
    for step in steps:
        chosen.zero_grad()
        order = list(enumerate(step.micro_batches))
        for number, indices in reversed(order) if reverse else order:
            batch = load_batch(SeededDataset(dataset, seed, step.epoch), indices)
            with seeded(trained, graph, seed, step.number, number):
                output = trained(*batch.args, **batch.kwargs)
            torch.autograd.backward(loss(output, batch.target) * (len(indices) / step.samples))
        if clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(trained.parameters(), clip_grad_norm)
        chosen.step()
    return trained


def _relative_difference(found: Tensor, expected: Tensor) -> float:
    if expected.numel() == 0:
        return 0.0
    difference = (found.double() - expected.double()).abs().max().item()
    return difference / max(expected.double().abs().max().item(), torch.finfo(torch.float32).tiny)
