"""Small networks with what makes equality hard: BatchNorm, skip connections, attention, dropout."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, LENGTH = 12, 6


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a skip connection, which is a convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.skip(x))


class Lopsided(nn.Module):
    """Layers of very different sizes, with statistics and a parameter that the loss does not depend on."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.first = nn.Linear(5, wide)
        self.norm = nn.BatchNorm1d(wide)
        self.unused = nn.Linear(wide, 3)
        self.second = nn.Linear(wide, narrow)
        self.last = nn.Linear(narrow, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        ignored = self.unused(x).detach().sum()
        output: Tensor = self.last(self.second(x)) + 0 * ignored
        return output


class Block(nn.Module):
    """Causal attention, then a small network for each position; both normalise first and add to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.dropout1 = nn.Dropout(0.1)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.contract = nn.Linear(2 * width, width)
        self.dropout2 = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.project(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout1(self.out(mixed))
        inner: Tensor = self.dropout2(self.contract(F.gelu(self.expand(self.norm2(x)))))
        return x + inner


class Embedding(nn.Module):
    """Words and their positions, and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.words(words) + self.positions)
        return x


def residual() -> nn.Module:
    """A convolutional network for images of 8x8 pixels and four classes."""
    stem = [nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
    blocks = [Residual(4, 4), Residual(4, 8, stride=2), Residual(8, 8)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def transformer() -> nn.Module:
    """A language model of two blocks."""
    return nn.Sequential(Embedding(8), Block(8), Block(8), nn.LayerNorm(8), nn.Linear(8, WORDS))


def words_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def images(samples: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    return torch.rand(samples, 1, 8, 8, generator=draw), torch.randint(4, (samples,), generator=draw)


def sentences(samples: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(WORDS, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return text[:, :-1], text[:, 1:]


@dataclass(frozen=True)
class Network:
    """A network, its loss, and so many samples: inputs and targets."""

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    data: Callable[[int], tuple[Tensor, Tensor]]


RESIDUAL = Network(residual, F.cross_entropy, images)
TRANSFORMER = Network(transformer, words_loss, sentences)
