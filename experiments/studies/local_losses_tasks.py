"""Four small tasks, and their training by replicas that train alone and meet every few steps.

Three are those of `experiments/studies/wire_sync_curves.py` at ea72f515, with smaller models and fewer steps. The
fourth is fine-tuning: a network that reads half of the digits learns the other half.
"""

import functools
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from experiments.models import characters, digits
from funcpipe.model.graph import trace
from funcpipe.training.batches import Batches, Step
from funcpipe.training.plain_rounds import LocalSteps, train_in_turn
from funcpipe.training.recipe import Recipe

UNSEEN_SAMPLES = 256
PRETRAINING_STEPS = 64
MICRO_BATCH = 8  # of the models with BatchNorm, whose losses depend on it
OLD, NEW = range(5), range(5, 10)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model that learns from global batches; without `micro_batch`, the share of a replica is one micro-batch."""

    model: Callable[[int], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    data: Callable[[], TensorDataset]
    unseen: Callable[[], TensorDataset]
    steps: int
    global_batch: int = 64
    micro_batch: int | None = None

    def batches(self, seed: int, replicas: int) -> list[Step]:
        """The steps, in an order that depends on the seed alone; samples beyond the last full batch are left out."""
        full = len(self.data()) // self.global_batch * self.global_batch
        micro_batch = self.micro_batch or self.global_batch // replicas
        order = Batches(samples=full, global_batch=self.global_batch, micro_batch=micro_batch, seed=seed)
        epochs = -(-self.steps // order.steps_per_epoch)
        return list(itertools.islice(order.steps_from(0, epochs), self.steps))


def train(task: Task, seed: int, replicas: int, local: LocalSteps) -> tuple[nn.Module, list[float]]:
    """Return the trained model, and the loss of each step: the mean over its samples, each by its replica's model."""
    model, data, steps = task.model(seed), task.data(), task.batches(seed, replicas)
    found: list[float] = []

    def recorded(output: Tensor, target: Tensor) -> Tensor:
        loss = task.loss(output, target)
        found.append(loss.item())
        return loss

    inputs = data.tensors[0][: len(steps[0].micro_batches[0])]
    trained = train_in_turn(
        model,
        trace(model, (inputs,)),
        data,
        steps,
        recipe=Recipe(loss=recorded, optimizer=task.optimizer),
        seed=seed,
        replicas=replicas,
        local=local,
    )
    return trained, step_means(found, steps)


def step_means(found: Sequence[float], steps: Sequence[Step]) -> list[float]:
    """Return the mean loss of each step, from those of micro-batches, which replicas compute step by step."""
    coming = iter(found)
    return [statistics.fmean(itertools.islice(coming, len(step.micro_batches))) for step in steps]


def unseen_loss(task: Task, model: nn.Module) -> tuple[float, float]:
    """The loss on held-out data, and the share that is right."""
    inputs, targets = (tensor[:UNSEEN_SAMPLES] for tensor in task.unseen().tensors)
    model.eval()
    with torch.no_grad():
        output = model(inputs)
        return float(task.loss(output, targets)), float((output.argmax(-1) == targets).float().mean())


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def of_classes(data: Callable[[], TensorDataset], classes: range) -> TensorDataset:
    """The images of these digits, which are counted from 0."""
    images, labels = data().tensors
    chosen = (labels >= classes.start) & (labels < classes.stop)
    return TensorDataset(images[chosen], labels[chosen] - classes.start)


small_digits = partial(digits.DigitNet, width=8)


@functools.cache
def pretrained(seed: int) -> Mapping[str, Tensor]:
    """The weights of a network that reads the digits 0 to 4, after plain training."""
    task = Task(
        model=partial(seeded, partial(small_digits, classes=len(OLD))),
        loss=digits.loss,
        optimizer=digits.optimizer,
        data=partial(of_classes, digits.train_data, OLD),
        unseen=partial(of_classes, digits.test_data, OLD),
        steps=PRETRAINING_STEPS,
        micro_batch=MICRO_BATCH,
    )
    network, _ = train(task, seed, 1, LocalSteps(sync_every=1))
    return network.state_dict()


def transferred(seed: int) -> nn.Module:
    """That network, with a fresh classifier for the digits 5 to 9."""
    network = seeded(partial(small_digits, classes=len(NEW)), seed)
    features = {name: values for name, values in pretrained(seed).items() if not name.startswith("classifier.")}
    network.load_state_dict(features, strict=False)
    return network


text, unseen_text = map(functools.cache, (characters.train_data, characters.test_data))

TASKS = {
    "transformer": Task(
        model=partial(seeded, partial(characters.CharacterTransformer, layers=3, width=48, heads=3, dropout=0.0)),
        loss=characters.loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.01),
        data=text,
        unseen=unseen_text,
        steps=128,
        global_batch=32,
    ),
    "digits": Task(
        model=partial(seeded, small_digits),
        loss=digits.loss,
        optimizer=digits.optimizer,
        data=digits.train_data,
        unseen=digits.test_data,
        steps=128,
        micro_batch=MICRO_BATCH,
    ),
    "characters": Task(
        model=partial(seeded, partial(characters.CharacterTransformer, layers=2, width=32, heads=2, dropout=0.0)),
        loss=characters.loss,
        optimizer=characters.optimizer,
        data=text,
        unseen=unseen_text,
        steps=192,
    ),
    "fine-tuning": Task(
        model=transferred,
        loss=digits.loss,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        data=partial(of_classes, digits.train_data, NEW),
        unseen=partial(of_classes, digits.test_data, NEW),
        steps=64,
        micro_batch=MICRO_BATCH,
    ),
}
