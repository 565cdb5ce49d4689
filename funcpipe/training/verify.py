"""Does a plan train this model as one process would? Both are done for a few steps and compared, tensor by tensor."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from funcpipe.model.graph import LayerGraph
from funcpipe.training.computation import LossFunction, OptimizerFactory
from funcpipe.training.data import MapDataset, Step, load
from funcpipe.training.rng import Reseeded, seeded

TOLERANCE = 1e-4
"""Relative difference up to which tensors count as equal: rounding, amplified over a few steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One tensor of the model's state: `difference` is the largest of any element, relative to the largest element."""

    name: str
    layer: str
    difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The state after some steps, over functions against one process, in order of the model's layers."""

    FORMAT: ClassVar[str] = "funcpipe.verification/1"

    steps: int
    tolerance: float
    tensors: tuple[Agreement, ...]

    @property
    def agrees(self) -> bool:
        """Whether every tensor agrees within the tolerance."""
        return self.first_difference is None

    @property
    def first_difference(self) -> Agreement | None:
        """The first tensor, by layer, that does not agree; also where one of the two is not a number."""
        return next((tensor for tensor in self.tensors if not tensor.difference <= self.tolerance), None)


def compare_states(
    graph: LayerGraph,
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    *,
    steps: int,
    tolerance: float = TOLERANCE,
) -> Verification:
    """Set the state `found` of a run beside the `expected` one of a single process."""
    layer_of = {name: layer.name for layer in reversed(graph.layers) for name in graph.tensors_of(layer)}
    rank = {layer.name: i for i, layer in enumerate(graph.layers)}
    names = sorted(expected, key=lambda name: rank.get(layer_of.get(name, ""), len(rank)))
    return Verification(
        steps=steps,
        tolerance=tolerance,
        tensors=tuple(
            Agreement(
                name=name,
                layer=layer_of.get(name, "outside the graph"),
                difference=_distance(found[name], expected[name]),
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

    With `reverse`, gradients are added up from the last micro-batch to the first, which shows what rounding does.
    """
    trained = copy.deepcopy(model).train()
    chosen = optimizer(trained.parameters())
    for step in steps:
        chosen.zero_grad()
        order = list(enumerate(step.micro_batches))
        for number, indices in reversed(order) if reverse else order:
            batch = load(Reseeded(dataset, seed, step.epoch), indices)
            with seeded(trained, graph, seed, step.number, number):
                output = trained(*batch.args, **batch.kwargs)
            torch.autograd.backward(loss(output, batch.target) * (len(indices) / step.samples))
        if clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(trained.parameters(), clip_grad_norm)
        chosen.step()
    return trained


def _distance(found: Tensor, expected: Tensor) -> float:
    if expected.numel() == 0:
        return 0.0
    difference = (found.double() - expected.double()).abs().max().item()
    return difference / max(expected.double().abs().max().item(), torch.finfo(torch.float32).tiny)
