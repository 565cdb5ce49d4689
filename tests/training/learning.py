"""A small network in double precision, schedules for it, and torch's own training loop to compare with."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from funcpipe.training.batches import Batches, Step

SAMPLES, GLOBAL_BATCH, MICRO_BATCH, EPOCHS = 20, 8, 2, 3
BATCHES = Batches(samples=SAMPLES, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=0)
STEPS = EPOCHS * BATCHES.steps_per_epoch

Scheduler = Callable[[Optimizer], lr.LRScheduler]
Samples = list[tuple[Tensor, Tensor]]

MOMENTUM: Callable[[Any], Optimizer] = partial(SGD, lr=0.05, momentum=0.9)


def network() -> nn.Module:
    """The network, always with the same weights."""
    torch.manual_seed(5)
    made = nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4)
    )
    return made.double()


def data() -> list[tuple[Tensor, Tensor]]:
    """The samples: vectors of six numbers, and their classes."""
    draw = torch.Generator().manual_seed(2)
    return [(torch.randn(6, generator=draw, dtype=torch.float64), torch.tensor(i % 4)) for i in range(SAMPLES)]


def by_name(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """No weight decay for biases and norms, and a smaller rate for the first layer; each stage lacks some groups."""
    named = list(named_parameters)
    first = [p for name, p in named if name.startswith("0.")]
    plain = [p for name, p in named if not name.startswith("0.") and p.ndim < 2]
    decayed = [p for name, p in named if not name.startswith("0.") and p.ndim > 1]
    groups: list[dict[str, Any]] = [
        {"params": first, "lr": 0.002},
        {"params": plain, "weight_decay": 0.0},
        {"params": decayed},
    ]
    return AdamW(groups, lr=0.01, weight_decay=0.3)


def _lambdas(optimizer: Optimizer) -> lr.LRScheduler:
    return lr.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n), lambda n: 0.5**n])


def _sequence(optimizer: Optimizer) -> lr.LRScheduler:
    parts = [lr.LinearLR(optimizer, total_iters=2), lr.CosineAnnealingLR(optimizer, 4), lr.MultiStepLR(optimizer, [1])]
    return lr.SequentialLR(optimizer, parts, [2, 6])


def _warm_up(optimizer: Optimizer) -> lr.LRScheduler:
    from transformers import get_linear_schedule_with_warmup  # takes long, and few tests want it

    warm_up: Callable[..., lr.LRScheduler] = get_linear_schedule_with_warmup
    return warm_up(optimizer, 2, STEPS)


SCHEDULERS: Mapping[str, Scheduler] = {
    "lambdas": _lambdas,
    "sequence": _sequence,
    "step": lambda optimizer: lr.StepLR(optimizer, 2),
    "milestones": lambda optimizer: lr.MultiStepLR(optimizer, [1, 2, 5]),
    "one cycle": lambda optimizer: lr.OneCycleLR(optimizer, [0.01, 0.02, 0.03], total_steps=STEPS),
    "cyclic": lambda optimizer: lr.CyclicLR(optimizer, 0.001, 0.02, step_size_up=2, mode="exp_range", gamma=0.9),
    "restarts": lambda optimizer: lr.CosineAnnealingWarmRestarts(optimizer, 2, T_mult=2),
    "chained": lambda optimizer: lr.ChainedScheduler(
        [lr.ConstantLR(optimizer, 0.5, 2), lr.ExponentialLR(optimizer, 0.9)]
    ),
    "SWA": lambda optimizer: SWALR(optimizer, swa_lr=0.004, anneal_epochs=3),
    "Hugging Face": _warm_up,
}


def averaged_by_ema(decay: float) -> Callable[[nn.Module], AveragedModel]:
    """Makes torch's moving average of a model."""
    return lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Reference:
    """What torch's own loop leaves: the model, its average, and the learning rates of the first group by step."""

    model: nn.Module
    averaged: AveragedModel | None
    rates: tuple[float, ...]


def train_plainly(
    steps: Sequence[Step],
    scheduler: Scheduler | None = None,
    *,
    by_step: bool = True,
    optimizer: Callable[..., Optimizer] = by_name,
    average: Callable[[nn.Module], AveragedModel] | None = None,
    averages_after: Callable[[int], bool] = lambda done: True,
    metrics: Mapping[int, float] | None = None,
) -> Reference:
    """Train the network by torch alone. A ReduceLROnPlateau is stepped with `metrics`, by the number of the step."""
    model, samples, rates = network(), data(), []
    chosen = optimizer(list(model.named_parameters()))
    schedule: Any = scheduler(chosen) if scheduler is not None else None
    averaged = None if average is None else average(copy.deepcopy(model))
    for step in steps:
        chosen.zero_grad()
        for indices in step.micro_batches:
            inputs = torch.stack([samples[i][0] for i in indices])
            targets = torch.stack([samples[i][1] for i in indices])
            loss = nn.functional.cross_entropy(model(inputs), targets) * (len(indices) / step.samples)
            torch.autograd.backward(loss)
        rates.append(float(chosen.param_groups[0]["lr"]))
        chosen.step()
        if isinstance(schedule, lr.ReduceLROnPlateau):
            if metrics is not None and step.number in metrics:
                schedule.step(metrics[step.number])
        elif schedule is not None and (by_step or (step.number + 1) % BATCHES.steps_per_epoch == 0):
            schedule.step()
        if averaged is not None and averages_after(step.number + 1):
            averaged.update_parameters(model)
    return Reference(model, averaged, tuple(rates))


def all_steps() -> tuple[Step, ...]:
    """The steps of all epochs."""
    return tuple(BATCHES.steps_from(0, EPOCHS))


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of any element."""
    assert found.keys() == expected.keys()
    return max(float((found[name].double() - expected[name].double()).abs().max()) for name in expected)


def on_whole_batches(
    model: nn.Module,
    samples: Samples,
    loss: Callable[[Any, Any], Tensor],
    *,
    schedule: Callable[..., Any] = lambda optimizer: lr.ConstantLR(optimizer, 1.0),
    by_step: bool = True,
    skips: Callable[[Step], bool] = lambda step: False,
) -> nn.Module:
    """Train on whole batches; steps that are to be skipped count for the schedule."""
    optimizer = MOMENTUM(model.parameters())
    scheduler = schedule(optimizer)
    for step in all_steps():
        batch = [samples[i] for indices in step.micro_batches for i in indices]
        optimizer.zero_grad()
        found = loss(model(torch.stack([x for x, _ in batch])), torch.stack([y for _, y in batch]))
        if found.requires_grad:
            torch.autograd.backward(found)
        if not skips(step):
            optimizer.step()
        if by_step or (step.number + 1) % BATCHES.steps_per_epoch == 0:
            scheduler.step()
    return model
