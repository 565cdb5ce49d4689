"""MobileNetV3-Small for ImageNet (Howard et al., 2019): depthwise convolutions, squeeze-and-excitation, hard-swish."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

loss = F.cross_entropy

# Of each block: kernel, inner channels, output channels, squeeze and excitation, hard-swish (else ReLU), stride.
SMALL = (
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1),
    (5, 576, 96, True, True, 1),
)


def convolution(
    inputs: int, outputs: int, activation: nn.Module, *, kernel: int = 1, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Return a convolution, BatchNorm and `activation`."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs, eps=0.001, momentum=0.01), activation)


def swish_or_relu(swish: bool) -> nn.Module:
    return nn.Hardswish(inplace=True) if swish else nn.ReLU(inplace=True)


class Excite(nn.Module):
    """Scale each channel by a gate that two small layers compute from the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        few = max(8, (channels // 4 + 4) // 8 * 8)  # a quarter, rounded to a multiple of eight
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(channels, few, 1)
        self.relu = nn.ReLU(inplace=True)
        self.widen = nn.Conv2d(few, channels, 1)
        self.gate = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.gate(self.widen(self.relu(self.squeeze(self.pool(x)))))
        return gate * x


class Inverted(nn.Module):
    """Widen, filter each channel by itself, excite, narrow; added to the input where the shape stays."""

    def __init__(self, inputs: int, row: tuple[int, int, int, bool, bool, int]) -> None:
        super().__init__()
        kernel, inner, outputs, excite, swish, stride = row
        self.adds = inputs == outputs and stride == 1
        self.layers = nn.Sequential()
        if inner != inputs:
            self.layers.append(convolution(inputs, inner, swish_or_relu(swish)))
        depthwise = convolution(inner, inner, swish_or_relu(swish), kernel=kernel, stride=stride, groups=inner)
        self.layers.append(depthwise)
        if excite:
            self.layers.append(Excite(inner))
        self.layers.append(convolution(inner, outputs, nn.Identity()))

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.layers(x)
        return x + inner if self.adds else inner


class MobileNet(nn.Module):
    """A stem, the blocks of a table, a wide 1x1 convolution and a classifier of two layers."""

    def __init__(
        self,
        blocks: tuple[tuple[int, int, int, bool, bool, int], ...] = SMALL,
        hidden: int = 1024,
        classes: int = 1000,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.stem = convolution(3, 16, swish_or_relu(True), kernel=3, stride=2)
        self.blocks = nn.Sequential()
        channels = 16
        for row in blocks:
            self.blocks.append(Inverted(channels, row))
            channels = row[2]
        self.last = convolution(channels, 6 * channels, swish_or_relu(True))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Linear(6 * channels, hidden), swish_or_relu(True), nn.Dropout(dropout), nn.Linear(hidden, classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        features = self.last(self.blocks(self.stem(images)))
        logits: Tensor = self.classifier(self.flatten(self.pool(features)))
        return logits


def model() -> nn.Module:
    return MobileNet()


def sample() -> tuple[Tensor, ...]:
    return (torch.rand(4, 3, 224, 224, generator=torch.Generator().manual_seed(0)),)


def target() -> Tensor:
    return torch.randint(1000, (4,), generator=torch.Generator().manual_seed(1))
