"""A U-Net (Ronneberger et al., 2015) with padded convolutions and BatchNorm: skip connections across the whole net."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

loss = F.cross_entropy  # over the classes of every pixel


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Return two 3x3 convolutions, each with BatchNorm and ReLU."""
    layers = (
        (nn.Conv2d(before, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))
        for before in (inputs, outputs)
    )
    return nn.Sequential(*(part for layer in layers for part in layer))


class UNet(nn.Module):
    """Down `depth` halvings with twice the channels each, and up again beside what each level saw on the way down."""

    def __init__(self, width: int = 64, depth: int = 4, colours: int = 3, classes: int = 2) -> None:
        super().__init__()
        channels = [width * 2**level for level in range(depth + 1)]
        self.enter = double_convolution(colours, width)
        self.pools = nn.ModuleList(nn.MaxPool2d(2) for _ in range(depth))
        self.downs = nn.ModuleList(double_convolution(channels[i], channels[i + 1]) for i in range(depth))
        upwards = range(depth - 1, -1, -1)
        self.grows = nn.ModuleList(nn.ConvTranspose2d(channels[i + 1], channels[i], 2, stride=2) for i in upwards)
        self.ups = nn.ModuleList(double_convolution(channels[i + 1], channels[i]) for i in upwards)
        self.classifier = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.enter(images)
        seen = []
        for pool, down in zip(self.pools, self.downs, strict=True):
            seen.append(x)
            x = down(pool(x))
        for grow, up in zip(self.grows, self.ups, strict=True):
            x = up(torch.cat([seen.pop(), grow(x)], dim=1))
        logits: Tensor = self.classifier(x)
        return logits


def model() -> nn.Module:
    return UNet()


def sample() -> tuple[Tensor, ...]:
    return (torch.rand(2, 3, 96, 96, generator=torch.Generator().manual_seed(0)),)


def target() -> Tensor:
    return torch.randint(2, (2, 96, 96), generator=torch.Generator().manual_seed(1))
