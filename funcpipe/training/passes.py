"""The forward and backward passes of one stage over the micro-batches of a step.

A micro-batch m passes through a stage as follows; `receive` and `take` are the ends of messages to other stages:

    receive_activation(m) → forward(m) → take_activations(m) → … → receive_gradient(m) → backward(m) → take_gradients(m)

With an output cache, the last stage computes no loss in its forwards, but `joint_loss` once between all forwards and
all backwards.

Gradients of the parameters add up in `grad` over the backwards of a step, as they do in one process.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from funcpipe.core import OnNan
from funcpipe.errors import DataError
from funcpipe.model.draws import SHARED_GENERATORS
from funcpipe.model.graph import Statistic
from funcpipe.model.split import StageModule
from funcpipe.model.tensors import flatten
from funcpipe.training.batches import Step
from funcpipe.training.carried import CarriedValues
from funcpipe.training.device import HOST, Device
from funcpipe.training.losses import seed_loss
from funcpipe.training.norms import Finiteness
from funcpipe.training.output_cache import OutputCache
from funcpipe.training.recipe import Recipe

Batch = tuple[Mapping[str, Tensor], Any]
"""The model inputs of one micro-batch by name, and its target."""


@dataclass
class _MicroBatch:
    """The state of one micro-batch in a stage between its forward and its backward.

    `batch` is what was loaded, if the forward runs again in the backward. `activations` are the values for later
    stages until they are sent; `roots` is where the gradients of those values enter the backward; `gradients` holds
    them by the stage that returned them; `input_gradients` are those of `received` until they are sent. `outputs` is
    where the gradients of the leaves of the model's output enter, if these are cached. `value` is that of the loss.
    `computed` marks where the device is done with what is sent.
    """

    received: dict[str, Tensor] = field(default_factory=dict)
    batch: Batch | None = None
    activations: dict[str, Tensor] = field(default_factory=dict)
    roots: dict[str, GradientEdge] = field(default_factory=dict)
    outputs: tuple[GradientEdge | None, ...] = ()
    loss: Tensor | None = None
    value: float = 0.0
    weight: float = 0.0
    gradients: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    input_gradients: dict[str, Tensor] = field(default_factory=dict)
    computed: Any = None


class Passes:
    """Runs one replica's micro-batches through its stage.

    The loss of a micro-batch is weighted by its share of the global batch's samples, so that the summed gradients are
    those of the loss averaged over the global batch, however the batch is cut. Of a weighted loss they are those of its
    sum, divided by the samples of the global batch. A replica that trains `alone` averages over its own samples. With
    `recompute`, activations are dropped after the forward and computed again in the backward. `loss_sum`, `weight` and
    `samples` add up over the step. A loss that is not finite ends the run, or makes all gradients of its step so, as
    `recipe.on_nan` says.
    """

    def __init__(
        self,
        stage: StageModule,
        *,
        recipe: Recipe,
        seed: int,
        recompute: bool,
        finiteness: Finiteness,
        statistics: Sequence[Statistic],
        cache: OutputCache | None = None,
        alone: bool = False,
        device: Device = HOST,
    ) -> None:
        """`statistics` are those that each forward just leaves in their buffers for the next one. With a `cache`, the
        loss is that of the whole global batch. The stage is on `device`, what is received and taken on the host.
        """
        self._stage = stage
        self._device = device
        self._loss = recipe.cast_loss
        self._is_weighted = recipe.is_weighted
        self._skips = recipe.on_nan is OnNan.SKIP
        self._finiteness = finiteness
        self._seed = seed
        learns = any(parameter.requires_grad for parameter in stage.parameters())
        recompute = recompute and (learns or not stage.differentiable.isdisjoint(stage.receives))  # else no backward
        self._recompute = recompute
        self._draws_backwards = stage.may_draw_backwards
        self._carried = CarriedValues(stage, statistics, recompute=recompute)
        self._alone = alone
        self.cache = cache
        self._held: dict[int, _MicroBatch] = {}
        self.loss_sum = 0.0
        self.weight = 0.0
        self.samples = 0

    def begin_step(self, step: Step, micro_batches: Iterable[int], take: Callable[[int], Batch]) -> None:
        """Start a step, of which this replica computes `micro_batches`; `take` gives what was loaded of one of them."""
        self._step = step
        self._take = take
        self._held = {m: _MicroBatch() for m in micro_batches}
        self._averaged_over = sum(len(step.micro_batches[m]) for m in self._held) if self._alone else step.samples
        self._carried.begin_step()
        if self.cache is not None:
            self.cache.begin_step(step, self._held)
        self.loss_sum = 0.0
        self.weight = 0.0
        self.samples = 0

    def end_step(self, *, undo: bool = False) -> None:
        """Drop what is left of the step's micro-batches; to `undo` the step, also what forwards leave for the next."""
        self._held = {}
        if undo:
            self._carried.undo_step()

    def receive_activation(self, micro_batch: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep values from an earlier stage for the forward of `micro_batch`."""
        self._held[micro_batch].received.update(self._device.receive(tensors))

    def forward(self, micro_batch: int) -> None:
        """Compute the values that later stages need and, in the last stage, the loss."""
        held = self._held[micro_batch]
        for name in self._stage.differentiable & held.received.keys():
            held.received[name].requires_grad_()
        self._carried.before_forward(micro_batch)
        with torch.set_grad_enabled(not self._recompute):
            self._run(held, micro_batch)
        if held.loss is not None:
            held.value = held.loss.item()
            self.samples += len(self._step.micro_batches[micro_batch])
            self.weight += held.weight
            self.loss_sum += held.value * self._averaged_over
            self._finiteness.check_loss(held.value, self._step.number, micro_batch)

    def joint_loss(self, *, loss_factor: float) -> None:
        """Compute the loss of the whole global batch, multiplied by `loss_factor`, where the backwards begin."""
        assert self.cache is not None, "outputs are kept"
        with SHARED_GENERATORS.computing():
            loss = self.cache.loss(lambda number: math.nan if self._is_skipped(number) else loss_factor)
        self.samples = sum(len(self._step.micro_batches[m]) for m in self._held)
        self.loss_sum = loss * self.samples
        self._finiteness.check_loss(loss, self._step.number)

    def _is_skipped(self, loss: float) -> bool:
        """True if all stages are to leave out the step with this loss, which they see in its norm."""
        return self._skips and not math.isfinite(loss)

    def take_activations(self, micro_batch: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the values `names` from the forward of `micro_batch`, to be sent; they are no longer held here."""
        held = self._held[micro_batch]
        return self._device.send({name: held.activations.pop(name) for name in names}, held.computed)

    def receive_gradient(self, micro_batch: int, stage: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep the gradients that a later stage returns for the values that it was sent."""
        self._held[micro_batch].gradients[stage] = self._device.receive(tensors)

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
        seeds += self._seeds_of_outputs(held, micro_batch)
        if held.loss is not None and held.loss.requires_grad:
            factor = math.nan if self._is_skipped(held.value) else loss_factor
            seeds.append((get_gradient_edge(held.loss), torch.full_like(held.loss, factor)))
        if seeds:
            with SHARED_GENERATORS.computing() if self._draws_backwards else contextlib.nullcontext():
                torch.autograd.backward([root for root, _ in seeds], [gradient for _, gradient in seeds])
        found = {name: tensor.grad for name, tensor in held.received.items() if tensor.grad is not None}
        self._held[micro_batch] = _MicroBatch(input_gradients=found, computed=self._device.computed())

    def take_gradients(self, micro_batch: int, names: Iterable[str]) -> dict[str, Tensor]:
        """The gradients of received values, to be sent back; a value that the loss does not depend on is left out."""
        held, found = self._held[micro_batch], self._held[micro_batch].input_gradients
        return self._device.send({name: found.pop(name) for name in names if name in found}, held.computed)

    def _seeds_of_outputs(self, held: _MicroBatch, micro_batch: int) -> Iterator[tuple[GradientEdge, Tensor]]:
        """Yield where the joint loss enters the backward, and its gradients there."""
        if self.cache is not None:
            for root, gradient in zip(held.outputs, self.cache.gradients(micro_batch), strict=True):
                if root is not None and gradient is not None:
                    yield root, gradient

    def _run(self, held: _MicroBatch, micro_batch: int) -> None:
        values: dict[str, Tensor] = dict(held.received)
        target: Any = None
        indices = self._step.micro_batches[micro_batch]
        if self._stage.inputs or self._stage.is_last:
            inputs, target = batch = held.batch or self._device.given(self._take(micro_batch))
            held.batch = batch if self._recompute else None
            values |= {name: inputs[name] for name in self._stage.inputs}
        sent, output = self._stage(values, (self._seed, self._step.number, micro_batch))
        held.activations = {name: tensor.detach() for name, tensor in sent.items()}
        held.computed = self._device.computed()
        held.roots = {name: get_gradient_edge(tensor) for name, tensor in sent.items() if tensor.requires_grad}
        if self.cache is not None:
            self.cache.keep(micro_batch, output, target)
            held.outputs = tuple(map(_root, flatten(output)[0]))
        elif self._stage.is_last:
            with SHARED_GENERATORS.computing():
                seed_loss(self._seed, self._step.number, micro_batch)
                held.loss, held.weight = self._share_of_loss(output, target, len(indices))

    def _share_of_loss(self, output: Any, target: Any, samples: int) -> tuple[Tensor, float]:
        """Return the micro-batch's share of the loss of the step, and its weight."""
        loss = self._loss(output, target)
        if self._is_weighted:
            total, weight = loss
            return total / self._averaged_over, weight
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise DataError("the loss function must return one number, the mean over the samples that it is given")
        return loss.reshape(()) * (samples / self._averaged_over), float(samples)


def _root(leaf: Any) -> GradientEdge | None:
    return get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None


def _summed(gradients: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sum of what several stages returned, added in order of stages: the same bits whichever came first."""
    total: dict[str, Tensor] = {}
    for stage in sorted(gradients):
        for name, gradient in gradients[stage].items():
            total[name] = total[name] + gradient if name in total else gradient
    return total
