"""What one replica of one stage computes: forwards, backwards, the sum of its gradients, its update."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from funcpipe.comm.collectives import Pattern, cut
from funcpipe.core import TieRoute
from funcpipe.errors import DataError
from funcpipe.model.seeds import layer_seed, reseed
from funcpipe.model.split import StageModule
from funcpipe.training import state_shards as shards
from funcpipe.training.batchnorm import RunningStatistics
from funcpipe.training.data import Step
from funcpipe.training.gradients import FlatGradient
from funcpipe.training.norms import GradientNorm, sum_of_squares
from funcpipe.training.sharding import ShardedOptimizer
from funcpipe.training.state import StageState, put_back, take
from funcpipe.training.ties import TiedParameters

LossFunction = Callable[[Any, Any], Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Batch = tuple[Mapping[str, Tensor], Any]
"""The model inputs of one micro-batch by name, and its target."""


@dataclass
class _MicroBatch:
    """What a stage holds of one micro-batch between its forward and its backward.

    `unsent` holds the elements of what later stages need until they are sent; `roots` is where its gradients enter;
    `gradients` are those by the stage that returned them.
    """

    received: dict[str, Tensor] = field(default_factory=dict)
    unsent: dict[str, Tensor] = field(default_factory=dict)
    roots: dict[str, GradientEdge] = field(default_factory=dict)
    loss: Tensor | None = None
    gradients: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    owed: dict[str, Tensor] = field(default_factory=dict)


class Computation:
    """The module and the optimiser of one worker, and what a training step holds in its memory.

    The loss of a micro-batch is weighted by its share of the global batch's samples, so that the summed gradients are
    those of the loss averaged over the global batch, however the batch is cut.
    """

    def __init__(
        self,
        stage: StageModule,
        *,
        loss: LossFunction,
        optimizer: OptimizerFactory,
        seed: int,
        recompute: bool,
        replica: int,
        replicas: int,
        number: int = 0,
        ties: Sequence[TieRoute] = (),
        norm: GradientNorm | None = None,
        shards: Pattern | None = None,
    ) -> None:
        """Stage `number` of the model, which sums the gradients of its parameters in `ties` with other stages.

        With `norm`, the step depends on the norm of all stages' gradients. With `shards`, the optimiser is divided over
        the replicas as that pattern cuts the gradient.
        """
        self._stage = stage
        self._loss = loss
        self._seed = seed
        self._recompute = recompute
        self._replica = replica
        self._replicas = replicas
        self._number = number
        self.norm = norm or GradientNorm()
        self._parameters = [p for p in stage.parameters() if p.requires_grad]
        held = dict(stage.named_parameters(remove_duplicate=False))
        self.tied = TiedParameters({common: held[name] for name, common in stage.shared.items()}, ties, number)
        self._summed_here = [p for p in self._parameters if not self.tied.is_borrowed(p)]
        self._statistics = RunningStatistics(stage)
        self._flat = FlatGradient(self._summed_here, self._statistics.contributions()) if replicas > 1 else None
        self._optimizer = optimizer(self._parameters) if self._parameters else None
        self._shards = self._divided(shards) if shards is not None else None
        self._held: dict[int, _MicroBatch] = {}
        self.loss_sum = 0.0
        self.samples = 0

    def begin(self, step: Step, load: Callable[[Sequence[int]], Batch]) -> None:
        """Get ready for a step; `load` brings the samples of those numbers, where the stage needs them."""
        self._step = step
        self._load = load
        self._held = {m: _MicroBatch() for m in range(self._replica, len(step.micro_batches), self._replicas)}
        self._statistics.begin(len(step.micro_batches))
        if self._flat is not None:
            self._flat.begin()
        self.loss_sum = 0.0
        self.samples = 0

    def receive_activation(self, micro_batch: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep what an earlier stage made."""
        self._held[micro_batch].received.update(tensors)

    def forward(self, micro_batch: int) -> None:
        """Compute what later stages need and, in the last stage, the loss."""
        held = self._held[micro_batch]
        for name in self._stage.differentiable & held.received.keys():
            held.received[name].requires_grad_()
        with torch.set_grad_enabled(not self._recompute):
            self._run(held, micro_batch)
        self._statistics.after_forward(micro_batch)
        if held.loss is not None:
            self.samples += len(self._step.micro_batches[micro_batch])
            self.loss_sum += held.loss.item() * self._step.samples

    def activations(self, micro_batch: int, names: Iterable[str]) -> dict[str, Tensor]:
        """What the forward of `micro_batch` made, by name, to be sent; it is not held any longer."""
        unsent = self._held[micro_batch].unsent
        return {name: unsent.pop(name) for name in names}

    def receive_gradient(self, micro_batch: int, stage: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep the gradients that a later stage returns for what was sent."""
        self._held[micro_batch].gradients[stage] = tensors

    def backward(self, micro_batch: int) -> None:
        """Add this micro-batch's part to the gradients of the parameters; frees its activations."""
        if self._flat is None or not self._flat.end_backward():
            self._propagate(micro_batch)

    def begin_last_backward(self, micro_batch: int) -> None:
        """Begin the step's last `backward`, which completes the elements of `flat` one after the other."""
        self.flat.last_backward(lambda: self._propagate(micro_batch))

    def _propagate(self, micro_batch: int) -> None:
        held = self._held[micro_batch]
        if self._recompute:
            self._run(held, micro_batch)
        gradients = _summed(held.gradients)
        seeds = [(root, gradients[name]) for name, root in held.roots.items() if name in gradients]
        if held.loss is not None and held.loss.requires_grad:
            seeds.append((get_gradient_edge(held.loss), torch.full_like(held.loss, self.norm.loss_factor)))
        if seeds:
            torch.autograd.backward([root for root, _ in seeds], [gradient for _, gradient in seeds])
        owed = {name: tensor.grad for name, tensor in held.received.items() if tensor.grad is not None}
        self._held[micro_batch] = _MicroBatch(owed=owed)

    def owed_gradients(self, micro_batch: int, names: Iterable[str]) -> dict[str, Tensor]:
        """The gradients of what was received; a tensor that the loss does not depend on is left out."""
        owed = self._held[micro_batch].owed
        return {name: owed.pop(name) for name in names if name in owed}

    def flatten(self) -> None:
        """Complete the vector of the step's gradients, and of what else the replicas sum."""
        self.flat.take(self._statistics.contributions())

    @property
    def flat(self) -> FlatGradient:
        """The vector of the step's gradients, which the replicas sum."""
        assert self._flat is not None, "a single replica sums nothing"
        return self._flat

    @property
    def is_sharded(self) -> bool:
        """Whether this replica keeps a part of the optimiser's state only."""
        return self._shards is not None

    def merged(self, round_number: int, values: Tensor) -> None:
        """Replace what this replica has summed in a round by the updated parameters, if it updates its own split."""
        if self._shards is not None:
            self._shards.update(round_number, values)

    def tied_sums(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The gradients of the whole global batch of tied parameters that this stage sums."""
        if self._flat is None:
            return self.tied.gradients(names)
        sums = {name: self._flat.summed(self.tied.parameter(name)) for name in names}
        return {name: gradient for name, gradient in sums.items() if gradient is not None}

    def measure_norm(self) -> None:
        """Keep the sum of the squares of the gradients that this stage sums; tied ones count in one stage alone."""
        own = sum_of_squares(p.grad for p in self._summed_here) if self._flat is None else self._flat.squares()
        self.norm.keep(self._number, own)

    def update(self) -> None:
        """Take the optimiser's step with the gradients of the whole global batch, and the running statistics'."""
        summed = list(self._unpack(self._flat)) if self._flat is not None else self._statistics.contributions()
        self.tied.finish()
        factor = self.norm.finish()
        if self._optimizer is not None and self._shards is None:
            if factor is not None:
                reseed(layer_seed(self._seed, self._step.number, 0, "optimizer"))
                self._scale_gradients(factor)
                self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self._statistics.finish(summed)
        self._held = {}

    def state(self) -> StageState:
        """What the stage has learned, between two steps; of a divided optimiser, this replica's part."""
        if self._shards is not None:
            return shards.take(self._stage, self._shards, self.norm)
        return take(self._stage, self._optimizer, self.norm)

    def restore(self, state: StageState) -> None:
        """Go back to `state`. Raises CorruptMessage if it is not this stage's."""
        if self._shards is not None:
            shards.put_back(state, self._stage, self._shards, self.norm)
        else:
            put_back(state, self._stage, self._optimizer, self.norm)

    def _divided(self, pattern: Pattern) -> ShardedOptimizer | None:
        if self._optimizer is None:
            return None
        own = pattern.merges(self._replica)
        assert own is not None, "every replica sums a split of its own"
        layout = self.flat.layout
        return ShardedOptimizer(
            self._optimizer, layout, [splits[own] for splits in cut(layout.elements, pattern, layout.head)]
        )

    def _unpack(self, flat: FlatGradient) -> tuple[Tensor, ...]:
        return flat.unpack() if self._shards is None else flat.unpack_parameters()

    def _scale_gradients(self, factor: float) -> None:
        for parameter in self._parameters:
            if factor != 1.0 and parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _run(self, held: _MicroBatch, micro_batch: int) -> None:
        values: dict[str, Tensor] = dict(held.received)
        target: Any = None
        indices = self._step.micro_batches[micro_batch]
        if self._stage.inputs or self._stage.is_last:
            inputs, target = self._load(indices)
            values |= {name: inputs[name] for name in self._stage.inputs}
        sent, output = self._stage(values, (self._seed, self._step.number, micro_batch))
        held.unsent = {name: tensor.detach() for name, tensor in sent.items()}
        held.roots = {name: get_gradient_edge(tensor) for name, tensor in sent.items() if tensor.requires_grad}
        if self._stage.is_last:
            held.loss = self._mean_loss(output, target) * (len(indices) / self._step.samples)

    def _mean_loss(self, output: Any, target: Any) -> Tensor:
        loss = self._loss(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise DataError("the loss function must return one number, the mean over the samples that it is given")
        return loss.reshape(())


def _summed(gradients: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sums of what several stages returned, in their order, so that they have the same bits whoever came first."""
    total: dict[str, Tensor] = {}
    for stage in sorted(gradients):
        for name, gradient in gradients[stage].items():
            total[name] = total[name] + gradient if name in total else gradient
    return total
