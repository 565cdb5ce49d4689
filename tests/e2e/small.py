"""A small model, its data and plans, for tests of whole runs."""

import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core import Plan
from tests.e2e.plans import even_plan

SAMPLES = 64
optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.1)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def sample() -> tuple[Tensor]:
    return (torch.zeros(2, 4),)


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(4, generator=generator), torch.tensor(i % 3)) for i in range(SAMPLES)]


def short_data() -> list[tuple[Tensor, Tensor]]:
    return data()[:3]


def other_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3))


def plan(stages: int = 2, replicas: int = 2, **options: Any) -> Plan:
    return even_plan(model(), sample(), stages=stages, replicas=replicas, micro_batch=2, micro_batches=2, **options)


def failing_loss(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("the loss function fails")


def sleeping_loss(output: Tensor, target: Tensor) -> Tensor:
    time.sleep(600)
    return output.mean()


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    """The cross entropy, after a while."""
    time.sleep(0.05)
    return nn.functional.cross_entropy(output, target)


GATES = "FUNCPIPE_TEST_GATES"
"""The environment variable with the folder of the files that `gated_loss` waits for."""

GATED_STEPS = 10
_calls = itertools.count(1)


def gated_loss(output: Tensor, target: Tensor) -> Tensor:
    """The cross entropy; after every `GATED_STEPS` steps of a function it waits for the next gate to be open.

    So however slow a test is, the run does not end before the test has done to it what it wants to do.
    """
    steps, odd = divmod(next(_calls), 2)
    gate = Path(os.environ[GATES]) / str(steps // GATED_STEPS)
    while not odd and steps % GATED_STEPS == 0 and not gate.exists():
        time.sleep(0.02)
    return nn.functional.cross_entropy(output, target)


def open_gates(*numbers: int) -> None:
    """Let functions that use `gated_loss` go on past these gates: the first is 1."""
    for number in numbers:
        (Path(os.environ[GATES]) / str(number)).touch()


def very_slow_loss(output: Tensor, target: Tensor) -> Tensor:
    """The cross entropy, after a longer while."""
    time.sleep(0.25)
    return nn.functional.cross_entropy(output, target)
