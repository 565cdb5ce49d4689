"""Handwritten digits and a network for them, whose code and data travel with a run: functions lack scikit-learn."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BATCH = 8
optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def model() -> nn.Module:
    """A small convolutional network for images of 8 x 8 pixels."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def data(steps: int) -> TensorDataset:
    """As many images and their digits as `steps` steps take."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, digits = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)
    return TensorDataset(images[: steps * BATCH], digits[: steps * BATCH])


def paused_loss(output: Tensor, target: Tensor, *, pause_s: float) -> Tensor:
    """The cross entropy, after a pause."""
    time.sleep(pause_s)
    return nn.functional.cross_entropy(output, target)
