"""Two intertwined spirals, separated by a small network: an example that needs no files and no other packages."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


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
    generator = torch.Generator().manual_seed(0)
    spiral = torch.arange(1024) % 2
    angle = 3 * math.pi * torch.rand(1024, generator=generator).sqrt()
    turned = angle + math.pi * spiral
    points = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 10
    return TensorDataset(points + 0.02 * torch.randn(1024, 2, generator=generator), spiral)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam."""
    return torch.optim.Adam(parameters, lr=0.01)
