"""What `funcpipe verify` says of runs with a mistake planted in them: it must find every one, and pass the run without.

A small network with BatchNorm, dropout, noise and tied weights is trained in three stages of two replicas; the last
global batch is short.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.model.graph import trace
from funcpipe.training.batches import Batches, Step
from funcpipe.training.computation import Computation
from funcpipe.training.passes import Batch
from funcpipe.training.plain import PlainTraining
from funcpipe.training.recipe import Recipe
from funcpipe.training.verify import Verification, verify_states
from tests.support.in_turn import InTurn, even_bounds

STAGES, REPLICAS, STEPS = 3, 2, 3
MICRO_BATCH, MICRO_BATCHES = 4, 4
Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01),
}


class Network(nn.Module):
    """Attention, whose key bias has no gradient but rounding, a bias ahead of BatchNorm, noise, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.middle = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0] + 0.01 * torch.randn_like(x)
        x = self.drop(torch.relu(self.norm(self.middle(x).mean(1))))
        return self.head(torch.tanh(self.last(x)))


class DroppedGradient(InTurn):
    """The gradient of one micro-batch is lost in the first stage."""

    def backward(self, step: Step, m: int) -> None:
        kept = [parameter.detach().clone() for parameter in self._gradients(m)]
        super().backward(step, m)
        if (step.number, m) == (1, 1):
            for gradient, old in zip(self._gradients(m), kept, strict=True):
                gradient.copy_(old)

    def _gradients(self, m: int) -> list[Tensor]:
        parameters = self.modules[0][m % self.replicas].parameters()
        return [parameter.grad for parameter in parameters if parameter.grad is not None]


class StaleTie(InTurn):
    """The stage that borrows a tied weight keeps its old copy."""

    def take_tied_sum(self, stage: int, replica: int, sums: Mapping[str, Tensor]) -> None:
        pass


class WrongShare(InTurn):
    """A micro-batch that is short weighs as much as a full one."""

    def worker(self, stage: int, replica: int) -> Computation:
        made = super().worker(stage, replica)
        made.passes._loss = lambda output, target: self.plain.recipe.loss(output, target) * (MICRO_BATCH / len(target))
        return made


class NoSynchronisation(InTurn):
    """The replicas of the middle stage keep their own gradients."""

    def take_sum(self, stage: int, replica: int, total: Tensor) -> None:
        if stage != 1:
            super().take_sum(stage, replica, total)


class OtherSeed(InTurn):
    """One stage draws its dropout from another seed."""

    def worker(self, stage: int, replica: int) -> Computation:
        made = super().worker(stage, replica)
        made.passes._seed += stage == 1
        return made


class MissingUpdate(InTurn):
    """One layer is left out of one update."""

    def update(self, step: Step, stage: int, replica: int) -> None:
        layer = next(iter(self.modules[-1][replica].parameters()))
        old = layer.detach().clone()
        super().update(step, stage, replica)
        if stage == STAGES - 1 and step.number == 1:
            layer.data.copy_(old)


class ScaledGradient(InTurn):
    """The gradients of one stage are larger by a hundredth, in one step."""

    def take_sum(self, stage: int, replica: int, total: Tensor) -> None:
        statistics = self.workers[stage][replica].flat.layout.head
        if stage == 1 and self.workers[1][0]._step.number == 1:
            total = torch.cat([total[:statistics], total[statistics:] * 1.01])
        super().take_sum(stage, replica, total)


class OtherOptimizer(InTurn):
    """The optimisers of one stage have another setting."""

    setting, factor = "", 1.0

    def worker(self, stage: int, replica: int) -> Computation:
        made = super().worker(stage, replica)
        optimizer = made._optimizer._optimizer
        if stage == 1 and optimizer is not None:
            optimizer.param_groups[0][self.setting] *= self.factor
        return made


class DoubleDecay(OtherOptimizer):
    """Weight decay is applied twice."""

    setting, factor = "weight_decay", 2.0


class OtherRate(OtherOptimizer):
    """The learning rate is off by one per cent."""

    setting, factor = "lr", 1.01


class SwappedTargets(InTurn):
    """Two micro-batches have each other's targets."""

    def load(self, step: Step, indices: Sequence[int]) -> Batch:
        inputs, target = super().load(step, indices)
        order = step.micro_batches
        if step.number == 0 and tuple(indices) in order[:2]:
            return inputs, super().load(step, order[1 - order.index(tuple(indices))])[1]
        return inputs, target


class OwnStatistics(InTurn):
    """BatchNorm's statistics are those of one replica."""

    def take_sum(self, stage: int, replica: int, total: Tensor) -> None:
        own = self.workers[stage][replica].flat
        super().take_sum(stage, replica, torch.cat([own.vector[: own.layout.head] * 2, total[own.layout.head :]]))


class OneStepBehind(InTurn):
    """The last stage misses the last step."""

    def update(self, step: Step, stage: int, replica: int) -> None:
        if stage < STAGES - 1 or step.number < STEPS - 1:
            super().update(step, stage, replica)


class LostMomentum(InTurn):
    """The optimiser of one stage forgets its state, as after a checkpoint without it."""

    def update(self, step: Step, stage: int, replica: int) -> None:
        optimizer = self.workers[stage][replica]._optimizer._optimizer
        if stage == 1 and step.number == 2 and optimizer is not None:
            optimizer.state.clear()
        super().update(step, stage, replica)


FAULTS: tuple[type[InTurn], ...] = (
    *(DroppedGradient, StaleTie, WrongShare, NoSynchronisation, OtherSeed, MissingUpdate, ScaledGradient),
    *(DoubleDecay, OtherRate, SwappedTargets, OwnStatistics, OneStepBehind, LostMomentum),
)


def training(optimizer: Optimizer) -> PlainTraining:
    torch.manual_seed(7)
    model, global_batch = Network(), MICRO_BATCH * MICRO_BATCHES
    samples = [(torch.randint(0, 11, (5,)), torch.tensor(i % 11)) for i in range(global_batch * STEPS - 2)]
    return PlainTraining(
        model=model,
        graph=trace(model, (torch.stack([ids for ids, _ in samples[:2]]),)),
        dataset=samples,
        steps=tuple(Batches(samples=len(samples), global_batch=global_batch, micro_batch=MICRO_BATCH, seed=0).epoch(0)),
        recipe=Recipe(loss=F.cross_entropy, optimizer=optimizer),
        seed=0,
    )


def verdict(kind: type[InTurn], optimizer: Optimizer) -> Verification:
    plain = training(optimizer)
    found = kind(plain, even_bounds(plain.graph, STAGES), REPLICAS).train()
    return verify_states(plain.graph, found, plain.run, steps=STEPS)


def main() -> None:
    torch.set_num_threads(1)
    for name, optimizer in OPTIMIZERS.items():
        kinds: tuple[type[InTurn], ...] = (InTurn, *FAULTS)
        for kind in kinds:
            first = verdict(kind, optimizer).first_difference
            text = "equal" if first is None else f"DIFFERS: {first.name} by {first.difference:.1e}"
            title = "no mistake" if kind is InTurn else (kind.__doc__ or "").strip()
            print(f"{name:5} {title:88} {text}", flush=True)


if __name__ == "__main__":
    main()
