"""AmoebaNet-D for ImageNet, as GPipe (Huang et al., 2019) measured it: (18, 256) and (36, 256) normal cells, filters.

The cells are those of Real et al., 2019. Which states a normal cell concatenates follows the authors' TensorFlow code,
not their figure: only so do the parameters agree with GPipe's table.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

loss = F.cross_entropy


def convolution(inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), stride: int = 1) -> nn.Sequential:
    """Return ReLU, convolution and BatchNorm; a kernel of odd sides keeps the picture's size at stride 1."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    layers = (nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm2d(outputs))
    return nn.Sequential(nn.ReLU(), *layers)


def bottleneck(channels: int, *kernels: tuple[int, int], stride: int = 1) -> nn.Sequential:
    """Return convolutions with `kernels` on a quarter of the channels; the first of them has the stride."""
    few = channels // 4
    inner = [convolution(few, few, kernel, 1 if number else stride) for number, kernel in enumerate(kernels)]
    return nn.Sequential(convolution(channels, few), *inner, convolution(few, channels))


OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "none": lambda channels, stride: nn.Identity(),
    "mean 3x3": lambda channels, stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
    "max 3x3": lambda channels, stride: nn.MaxPool2d(3, stride, padding=1),
    "max 2x2": lambda channels, stride: nn.MaxPool2d(2, stride),
    "1x1": lambda channels, stride: convolution(channels, channels, stride=stride),
    "3x3": lambda channels, stride: bottleneck(channels, (3, 3), stride=stride),
    "1x7 7x1": lambda channels, stride: bottleneck(channels, (1, 7), (7, 1), stride=stride),
}

# A cell's states: 0 is the previous cell's output, 1 that of the cell before it, each row adds the sum of its two.
NORMAL = (
    ((1, "1x1"), (1, "max 3x3")),
    ((1, "none"), (0, "1x7 7x1")),
    ((0, "1x1"), (0, "1x7 7x1")),
    ((2, "max 3x3"), (2, "none")),
    ((1, "mean 3x3"), (5, "1x1")),
)
NORMAL_KEEPS = (0, 3, 4, 6)
REDUCTION = (
    ((0, "max 2x2"), (0, "max 3x3")),
    ((2, "none"), (1, "3x3")),
    ((2, "1x7 7x1"), (2, "max 3x3")),
    ((3, "none"), (1, "max 2x2")),
    ((2, "mean 3x3"), (3, "1x1")),
)
REDUCTION_KEEPS = (4, 5, 6)


class Halve(nn.Module):
    """Half the height and width: one half of the channels sees the even pixels, the other the odd ones."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        shifted = F.pad(x, (-1, 1, -1, 1))  # without the first row and column, with a last of zeros
        halved: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return halved


class Cell(nn.Module):
    """Five sums of two operations each, some of them concatenated; a reducing cell halves the picture."""

    def __init__(self, *, earlier: int, previous: int, channels: int, reduces: bool, after_reduction: bool) -> None:
        super().__init__()
        rows = REDUCTION if reduces else NORMAL
        self.keeps = REDUCTION_KEEPS if reduces else NORMAL_KEEPS
        self.sources = tuple((left, right) for (left, _), (right, _) in rows)
        self.enter_previous = convolution(previous, channels)
        self.enter_earlier: nn.Module = nn.Identity()
        if after_reduction:
            self.enter_earlier = Halve(earlier, channels)
        elif earlier != channels:
            self.enter_earlier = convolution(earlier, channels)
        operations = [
            OPERATIONS[name](channels, 2 if reduces and source < 2 else 1) for row in rows for source, name in row
        ]
        self.left = nn.ModuleList(operations[0::2])
        self.right = nn.ModuleList(operations[1::2])

    def forward(self, earlier: Tensor, previous: Tensor) -> Tensor:
        states = [self.enter_previous(previous), self.enter_earlier(earlier)]
        for (left, right), on_left, on_right in zip(self.sources, self.left, self.right, strict=True):
            states.append(on_left(states[left]) + on_right(states[right]))
        return torch.cat([states[number] for number in self.keeps], dim=1)


class AmoebaNet(nn.Module):
    """A convolution, two reducing cells, thrice `normal_cells / 3` cells with a reducing one between, a classifier."""

    def __init__(self, normal_cells: int = 18, filters: int = 256, classes: int = 1000) -> None:
        super().__init__()
        group = [False] * (normal_cells // 3)
        channels = earlier = previous = filters // 4
        self.stem = nn.Sequential(
            nn.ReLU(), nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels)
        )
        self.cells = nn.ModuleList()
        after_reduction = False
        for reduces in (True, True, *group, True, *group, True, *group):
            channels *= 2 if reduces else 1
            self.cells.append(
                Cell(
                    earlier=earlier,
                    previous=previous,
                    channels=channels,
                    reduces=reduces,
                    after_reduction=after_reduction,
                )
            )
            earlier, previous = previous, channels * len(REDUCTION_KEEPS if reduces else NORMAL_KEEPS)
            after_reduction = reduces
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(previous, classes))

    def forward(self, images: Tensor) -> Tensor:
        earlier = previous = self.stem(images)
        for cell in self.cells:
            earlier, previous = previous, cell(earlier, previous)
        logits: Tensor = self.classifier(previous)
        return logits


def model() -> nn.Module:
    """Return AmoebaNet-D (18, 256): 24 trainable layers."""
    return AmoebaNet()


def model_36() -> nn.Module:
    """Return AmoebaNet-D (36, 256): 42 trainable layers."""
    return AmoebaNet(normal_cells=36)


def sample() -> tuple[Tensor, ...]:
    return (torch.rand(4, 3, 224, 224, generator=torch.Generator().manual_seed(0)),)


def target() -> Tensor:
    return torch.randint(1000, (4,), generator=torch.Generator().manual_seed(1))
