"""A recommender of two towers: what a user saw (item numbers) and what an item is (features), joined at the end."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

loss = F.binary_cross_entropy_with_logits
NOTHING = 0  # the item number that fills up a short history


class UserTower(nn.Module):
    """The mean embedding of the items in a history, through two layers."""

    def __init__(self, items: int, width: int) -> None:
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, history: Tensor) -> Tensor:
        seen = (history != NOTHING).unsqueeze(-1)
        total = (self.items(history) * seen).sum(dim=1)
        user: Tensor = self.norm(self.layers(total / seen.sum(dim=1).clamp(min=1)))
        return user


class ItemTower(nn.Module):
    """An item's features through three layers with BatchNorm and dropout."""

    def __init__(self, features: int, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for inputs in (features, 4 * width):
            self.layers.append(nn.Linear(inputs, 4 * width))
            self.layers.append(nn.BatchNorm1d(4 * width))
            self.layers.append(nn.ReLU(inplace=True))
            self.layers.append(nn.Dropout(dropout))
        self.layers.append(nn.Linear(4 * width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, features: Tensor) -> Tensor:
        item: Tensor = self.norm(self.layers(features))
        return item


class TwoTower(nn.Module):
    """The logit of a click: the scaled product of the user's and the item's vector, and a bias."""

    def __init__(self, items: int = 1000, features: int = 64, width: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        self.user = UserTower(items, width)
        self.item = ItemTower(features, width, dropout)
        self.bias = nn.Parameter(torch.zeros(1))
        self.scale = width**-0.5

    def forward(self, history: Tensor, features: Tensor) -> Tensor:
        product = (self.user(history) * self.item(features)).sum(dim=1)
        logits: Tensor = product * self.scale + self.bias
        return logits


def model() -> nn.Module:
    return TwoTower()


def sample() -> tuple[Tensor, ...]:
    """Return 16 histories of at most 20 items, and the features of 16 items."""
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(1, 1000, (16, 20), generator=generator)
    lengths = torch.randint(1, 21, (16, 1), generator=generator)
    return history.where(torch.arange(20) < lengths, NOTHING), torch.randn(16, 64, generator=generator)


def target() -> Tensor:
    return torch.randint(2, (16,), generator=torch.Generator().manual_seed(1)).float()
