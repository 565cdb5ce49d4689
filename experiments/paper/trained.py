"""The model that the executed systems train: a character-level transformer of 10.7 million parameters, and its data."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from experiments.models import characters

NAME = "characters, 10.7 M parameters"
BATCH, MICRO_BATCH = 64, 16
BLOCKS = tuple(f"blocks.{number}" for number in range(6))
"""Each is one layer, which takes so long that a share of a processor is measured and not its first milliseconds."""
loss = characters.loss


def model() -> nn.Module:
    """The same weights each time, without dropout, so that all systems compute the same."""
    torch.manual_seed(1)
    return characters.CharacterTransformer(layers=6, width=384, heads=6, dropout=0.0)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def sample(micro_batch: int = MICRO_BATCH) -> tuple[Tensor, Tensor]:
    """A micro-batch and its targets."""
    inputs, targets = characters.train_data()[:micro_batch]
    return inputs, targets


def data(steps: int, batch: int = BATCH) -> Subset[tuple[Tensor, ...]]:
    """The samples of so many steps."""
    return Subset(characters.train_data(), range(steps * batch))
