"""A residual network that reads the 8x8 handwritten digits bundled with scikit-learn."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

loss = F.cross_entropy


class Residual(nn.Module):
    """Two 3x3 convolutions beside a skip connection, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        joined: Tensor = self.relu2(inner + self.skip(x))
        return joined


class DigitNet(nn.Module):
    """A stem, residual blocks at 16x16 and at 8x8 pixels, and a linear classifier."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.blocks = nn.Sequential(
            Residual(width, width),
            Residual(width, 2 * width, stride=2),
            Residual(2 * width, 2 * width),
            Residual(2 * width, 2 * width),
            Residual(2 * width, 2 * width),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.relu(self.norm(self.stem(self.upsample(images)))))
        logits: Tensor = self.classifier(self.flatten(self.pool(features)))
        return logits


def model() -> nn.Module:
    """Return the network with fresh weights, drawn from torch's global generator."""
    return DigitNet()


def sample() -> tuple[Tensor, ...]:
    """Return the inputs of one micro-batch of 16 images."""
    return (torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(0)),)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def train_data() -> TensorDataset:
    """Return 1437 pairs of image (1x8x8, from 0 to 1) and digit."""
    return _digits(held_out=False)


def test_data() -> TensorDataset:
    """Return the other 360 pairs: of each digit, every fifth image."""
    return _digits(held_out=True)


def _digits(*, held_out: bool) -> TensorDataset:
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.as_tensor(digits, dtype=torch.int64)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[torch.argsort(labels, stable=True)[::5]] = True
    if not held_out:
        chosen = ~chosen
    return TensorDataset(images[chosen], labels[chosen])
