"""The forward and backward passes of one stage over the micro-batches of a step.

A micro-batch m passes through a stage as follows; `receive` and `take` are the ends of messages to other stages:

    receive_activation(m) → forward(m) → take_activations(m) → … → receive_gradient(m) → backward(m) → take_gradients(m)

Gradients of the parameters add up in `grad` over the backwards of a step, as they do in one process.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from funcpipe.errors import DataError
from funcpipe.model.split import StageModule
from funcpipe.training.carried import CarriedValues
from funcpipe.training.data import Step
from funcpipe.training.rng import seed_loss

LossFunction = Callable[[Any, Any], Tensor]
"""The mean loss over a batch, of the model's output and the target."""

Batch = tuple[Mapping[str, Tensor], Any]
"""The model inputs of one micro-batch by name, and its target."""


@dataclass
class _MicroBatch:
    """What a stage holds of one micro-batch between its forward and its backward.

    `activations` are the values for later stages until they are sent; `roots` is where the gradients of those values
    enter the backward; `gradients` holds them by the stage that returned them; `input_gradients` are those of
    `received` until they are sent.
    """

    received: dict[str, Tensor] = field(default_factory=dict)
    activations: dict[str, Tensor] = field(default_factory=dict)
    roots: dict[str, GradientEdge] = field(default_factory=dict)
    loss: Tensor | None = None
    gradients: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    input_gradients: dict[str, Tensor] = field(default_factory=dict)


class Passes:
    """Runs one replica's micro-batches through its stage.

    The loss of a micro-batch is weighted by its share of the global batch's samples, so that the summed gradients are
    those of the loss averaged over the global batch, however the batch is cut. With `recompute`, activations are
    dropped after the forward and computed again in the backward. `loss_sum` and `samples` add up over the step.
    """

    def __init__(self, stage: StageModule, *, loss: LossFunction, seed: int, recompute: bool) -> None:
        self._stage = stage
        self._loss = loss
        self._seed = seed
        self._recompute = recompute
        self._carried = CarriedValues(stage, recompute=recompute)
        self._held: dict[int, _MicroBatch] = {}
        self.loss_sum = 0.0
        self.samples = 0

    def begin_step(self, step: Step, micro_batches: Iterable[int], load: Callable[[Sequence[int]], Batch]) -> None:
        """Start a step, of which this replica computes `micro_batches`; `load` loads the samples at some indices."""
        self._step = step
        self._load = load
        self._held = {m: _MicroBatch() for m in micro_batches}
        self._carried.begin_step()
        self.loss_sum = 0.0
        self.samples = 0

    def end_step(self) -> None:
        """Drop what is left of the step's micro-batches."""
        self._held = {}

    def receive_activation(self, micro_batch: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep values from an earlier stage for the forward of `micro_batch`."""
        self._held[micro_batch].received.update(tensors)

    def forward(self, micro_batch: int) -> None:
        """Compute the values that later stages need and, in the last stage, the loss."""
        held = self._held[micro_batch]
        for name in self._stage.differentiable & held.received.keys():
            held.received[name].requires_grad_()
        self._carried.before_forward(micro_batch)
        with torch.set_grad_enabled(not self._recompute):
            self._run(held, micro_batch)
        if held.loss is not None:
            self.samples += len(self._step.micro_batches[micro_batch])
            self.loss_sum += held.loss.item() * self._step.samples

    def take_activations(self, micro_batch: int, names: Iterable[str]) -> dict[str, Tensor]:
        """The values `names` from the forward of `micro_batch`, to be sent; they are no longer held here."""
        activations = self._held[micro_batch].activations
        return {name: activations.pop(name) for name in names}

    def receive_gradient(self, micro_batch: int, stage: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep the gradients that a later stage returns for the values that it was sent."""
        self._held[micro_batch].gradients[stage] = tensors

    def backward(self, micro_batch: int, *, loss_factor: float) -> None:
        """Add this micro-batch's part to the gradients of the parameters, the loss multiplied by `loss_factor`.

        Frees the micro-batch's activations.
        """
        held = self._held[micro_batch]
        if self._recompute:
            with self._carried.recomputing(micro_batch):
                self._run(held, micro_batch)
        gradients = _summed(held.gradients)
        seeds = [(root, gradients[name]) for name, root in held.roots.items() if name in gradients]
        if held.loss is not None and held.loss.requires_grad:
            seeds.append((get_gradient_edge(held.loss), torch.full_like(held.loss, loss_factor)))
        if seeds:
            torch.autograd.backward([root for root, _ in seeds], [gradient for _, gradient in seeds])
        found = {name: tensor.grad for name, tensor in held.received.items() if tensor.grad is not None}
        self._held[micro_batch] = _MicroBatch(input_gradients=found)

    def take_gradients(self, micro_batch: int, names: Iterable[str]) -> dict[str, Tensor]:
        """The gradients of received values, to be sent back; a value that the loss does not depend on is left out."""
        found = self._held[micro_batch].input_gradients
        return {name: found.pop(name) for name in names if name in found}

    def _run(self, held: _MicroBatch, micro_batch: int) -> None:
        values: dict[str, Tensor] = dict(held.received)
        target: Any = None
        indices = self._step.micro_batches[micro_batch]
        if self._stage.inputs or self._stage.is_last:
            inputs, target = self._load(indices)
            values |= {name: inputs[name] for name in self._stage.inputs}
        sent, output = self._stage(values, (self._seed, self._step.number, micro_batch))
        held.activations = {name: tensor.detach() for name, tensor in sent.items()}
        held.roots = {name: get_gradient_edge(tensor) for name, tensor in sent.items() if tensor.requires_grad}
        if self._stage.is_last:
            seed_loss(self._seed, self._step.number, micro_batch)
            held.loss = self._mean_loss(output, target) * (len(indices) / self._step.samples)

    def _mean_loss(self, output: Any, target: Any) -> Tensor:
        loss = self._loss(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise DataError("the loss function must return one number, the mean over the samples that it is given")
        return loss.reshape(())


def _summed(gradients: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sum of what several stages returned, added in order of stages: the same bits whichever came first."""
    total: dict[str, Tensor] = {}
    for stage in sorted(gradients):
        for name, gradient in gradients[stage].items():
            total[name] = total[name] + gradient if name in total else gradient
    return total
