"""ResNet-101 for ImageNet (He et al., 2016), with the stride in the 3x3 convolution of a bottleneck."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

loss = F.cross_entropy


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, the last to four times the channels, beside a skip connection."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * channels
        self.conv1 = nn.Conv2d(inputs, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv3 = nn.Conv2d(channels, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.skip: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu3 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.relu1(self.norm1(self.conv1(x)))
        inner = self.relu2(self.norm2(self.conv2(inner)))
        joined: Tensor = self.relu3(self.norm3(self.conv3(inner)) + self.skip(x))
        return joined


class ResNet(nn.Module):
    """A stem, four groups of bottlenecks of which each after the first halves the picture, a linear classifier."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 23, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks = nn.Sequential()
        inputs = width
        for group, count in enumerate(blocks):
            channels = width * 2**group
            for number in range(count):
                self.blocks.append(Bottleneck(inputs, channels, stride=2 if group > 0 and number == 0 else 1))
                inputs = 4 * channels
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.stem(images))
        logits: Tensor = self.classifier(self.flatten(self.pool(features)))
        return logits


def model() -> nn.Module:
    return ResNet()


def sample() -> tuple[Tensor, ...]:
    return (torch.rand(4, 3, 224, 224, generator=torch.Generator().manual_seed(0)),)


def target() -> Tensor:
    return torch.randint(1000, (4,), generator=torch.Generator().manual_seed(1))
