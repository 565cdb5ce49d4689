"""Two intertwined spirals, separated by a small network: an example that needs no files and no other packages."""

import math
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    import optuna

    from funcpipe import FuncPipe


def model() -> nn.Module:
    """The network with fresh weights: points of the plane in, a score for each of the two spirals out."""
    return nn.Sequential(
        *(nn.Linear(2, 64), nn.Tanh()),
        *(nn.Linear(64, 64), nn.Tanh()),
        *(nn.Linear(64, 64), nn.Tanh()),
        nn.Linear(64, 2),
    )


def sample() -> tuple[Tensor, ...]:
    """The inputs of one micro-batch of 16 points."""
    return (torch.zeros(16, 2),)


def train_data() -> TensorDataset:
    """1024 pairs of a point and the number of its spiral, the same ones at each call."""
    return _points(1024, seed=0)


def _points(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    spiral = torch.arange(count) % 2
    angle = 3 * math.pi * torch.rand(count, generator=generator).sqrt()
    turned = angle + math.pi * spiral
    points = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 10
    return TensorDataset(points + 0.02 * torch.randn(count, 2, generator=generator), spiral)


def held_out() -> TensorDataset:
    """256 more of them, to validate on."""
    return _points(256, seed=1)


def trial(trial: "optuna.Trial") -> "FuncPipe":
    """The network with a learning rate and a momentum of a sweep's trial."""
    from funcpipe import FuncPipe

    rate, momentum = trial.suggest_float("lr", 1e-3, 1.0, log=True), trial.suggest_float("momentum", 0.0, 0.95)
    torch.manual_seed(0)
    settings = partial(torch.optim.SGD, lr=rate, momentum=momentum)
    return FuncPipe(model(), loss_fn=nn.functional.cross_entropy, optimizer=settings)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam."""
    return torch.optim.Adam(parameters, lr=0.01)
