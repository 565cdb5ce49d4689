"""Verification passes runs that rounding alone tells from plain training, and finds mistakes of every kind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.core import from_text, to_text
from funcpipe.model.graph import trace
from funcpipe.training.batches import Batches, Step
from funcpipe.training.computation import Computation
from funcpipe.training.plain import PlainTraining
from funcpipe.training.recipe import Recipe
from funcpipe.training.verify import Verification, Yardstick, verify_states
from tests.support.in_turn import InTurn, even_bounds

Optimizer = Callable[[Any], torch.optim.Optimizer]
SGD: Optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM: Optimizer = partial(torch.optim.Adam, lr=1e-3)
STEPS = 3


class Attention(nn.Module):
    """Two biases have no gradient but rounding: that of attention's keys, and the one ahead of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(6, 6)
        self.query = nn.Linear(6, 6)
        self.before = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        mixed = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), -1) @ x
        return self.head(self.drop(torch.tanh(self.norm(self.before(mixed.mean(1))))))


def training(optimizer: Optimizer, *, model: nn.Module | None = None, seed: int = 0) -> PlainTraining:
    torch.manual_seed(seed)
    chosen = model or Attention()
    data = [(torch.randn(4, 6), torch.tensor(i % 3)) for i in range(16 * STEPS)]
    return PlainTraining(
        model=chosen,
        graph=trace(chosen, (torch.zeros(4, 4, 6),)),
        dataset=data,
        steps=tuple(Batches(samples=len(data), global_batch=16, micro_batch=4, seed=0).epoch(0)),
        recipe=Recipe(loss=F.cross_entropy, optimizer=optimizer),
        seed=0,
    )


def verdict(kind: type[InTurn], plain: PlainTraining) -> Verification:
    found = kind(plain, even_bounds(plain.graph, 2), 2).train()
    return verify_states(plain.graph, found, plain.run, steps=STEPS)


def test_gradients_of_nothing_but_rounding_are_judged_by_rounding() -> None:
    judged = set[str]()
    for seed in range(3):
        found = verdict(InTurn, training(ADAM, seed=seed))
        assert found.agrees
        judged |= {tensor.name for tensor in found.tensors if tensor.yardstick is Yardstick.ROUNDING}
        assert from_text(Verification, to_text(found), source="verification.json") == found
    assert judged & {"key.bias", "before.bias"}
    assert judged <= {"key.bias", "before.bias", "norm.running_mean"}


def test_a_bias_of_one_element_whose_gradient_is_rounding_is_passed() -> None:
    class Narrow(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.key = nn.Linear(6, 1)
            self.query = nn.Linear(6, 1)

    assert all(verdict(InTurn, training(ADAM, model=Narrow(), seed=seed)).agrees for seed in range(3))


class Slower(InTurn):
    """The learning rate of one stage is one per cent too small."""

    def worker(self, stage: int, replica: int) -> Computation:
        made = super().worker(stage, replica)
        for group in made._optimizer._optimizer.param_groups if stage == 1 and made._optimizer._optimizer else ():
            group["lr"] *= 0.99
        return made


class Unsummed(InTurn):
    """The replicas of the last stage keep their own gradients."""

    def take_sum(self, stage: int, replica: int, total: Tensor) -> None:
        if stage == 0:
            super().take_sum(stage, replica, total)


class Scaled(InTurn):
    """One stage's gradients are too large by a hundredth."""

    def take_sum(self, stage: int, replica: int, total: Tensor) -> None:
        head = self.workers[stage][replica].flat.layout.head
        super().take_sum(stage, replica, torch.cat([total[:head], total[head:] * (1.01 if stage else 1.0)]))


class OtherDropout(InTurn):
    """Dropout is drawn from another seed."""

    def worker(self, stage: int, replica: int) -> Computation:
        made = super().worker(stage, replica)
        made.passes._seed += 1
        return made


class Behind(InTurn):
    """One stage misses the last step."""

    def update(self, step: Step, stage: int, replica: int) -> None:
        if stage == 0 or step.number < STEPS - 1:
            super().update(step, stage, replica)


@pytest.mark.parametrize("mistake", [Slower, Unsummed, Scaled, OtherDropout, Behind])
def test_mistakes_are_found(mistake: type[InTurn]) -> None:
    assert not verdict(mistake, training(SGD)).agrees


def test_an_older_document_is_read_and_judged_by_its_tolerance() -> None:
    text = """{"format": "funcpipe.verification/1", "steps": 3, "tolerance": 0.0001, "tensors": [
        {"name": "a", "layer": "0", "difference": 0.0}, {"name": "b", "layer": "0", "difference": 0.1}]}"""
    found = from_text(Verification, text, source="old.json")
    assert found.first_difference == found.tensors[1]
    assert [found.accepts(tensor) for tensor in found.tensors] == [True, False]
