"""DenseNet-121 for ImageNet (Huang et al., 2017): every layer of a block reads all those before it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

loss = F.cross_entropy


def convolution(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    """Return BatchNorm, ReLU and a convolution that keeps the picture's size."""
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
    )


class DenseBlock(nn.Module):
    """Layers that each add `growth` channels to the concatenation of the input and all earlier layers."""

    def __init__(self, inputs: int, layers: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(convolution(inputs + number * growth, 4 * growth, 1), convolution(4 * growth, growth, 3))
            for number in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(torch.cat(made, dim=1)))
        return torch.cat(made, dim=1)


class DenseNet(nn.Module):
    """A stem, dense blocks with a halving of channels, height and width between, a linear classifier."""

    def __init__(self, layers: tuple[int, ...] = (6, 12, 24, 16), growth: int = 32, classes: int = 1000) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks = nn.Sequential()
        for number, count in enumerate(layers):
            if number > 0:
                self.blocks.append(convolution(channels, channels // 2, 1))
                self.blocks.append(nn.AvgPool2d(2))
                channels //= 2
            self.blocks.append(DenseBlock(channels, count, growth))
            channels += count * growth
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.relu(self.norm(self.blocks(self.stem(images))))
        logits: Tensor = self.classifier(self.flatten(self.pool(features)))
        return logits


def model() -> nn.Module:
    return DenseNet()


def sample() -> tuple[Tensor, ...]:
    return (torch.rand(4, 3, 224, 224, generator=torch.Generator().manual_seed(0)),)


def target() -> Tensor:
    return torch.randint(1000, (4,), generator=torch.Generator().manual_seed(1))
