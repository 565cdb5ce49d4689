"""Parts that tracing may get wrong: they depend on data, sizes, chance or what was before, or share parameters."""

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.model.graph.composed.base import WIDTH, Inputs, Part, parts_in


class TiedLater(Part):
    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unread.weight = self.inner.weight


class TiedEarlier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Linear(WIDTH, WIDTH, bias=False)
        self.used = nn.Linear(WIDTH, WIDTH)
        self.used.weight = self.unread.weight

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return torch.sin(self.used(x))


class MaskedFill(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.inner(x.masked_fill(~inputs.mask[..., None], 0.0))


class Selected(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        y = x.clone()
        y[inputs.mask] = self.inner(x[inputs.mask])
        return y


class Where(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return torch.where(x > 0, self.inner(x), 0.5 * x)


class Counter(Part):
    calls = 0

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        self.calls += 1
        return self.inner(x) / (1 + 0.1 * self.calls)


class Temperature(Part):
    def __init__(self) -> None:
        super().__init__()
        self.settings = {"temperature": 2.0}

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        self.settings["temperature"] *= 0.9
        return torch.softmax(self.inner(x) / self.settings["temperature"], -1)


class Carried(Part):
    last: Tensor | None = None

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        before = torch.zeros(WIDTH) if self.last is None else self.last
        self.last = x.detach().mean((0, 1))
        return self.inner(x) + before


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        flat = x.reshape(-1, WIDTH)
        weights = self.router(flat).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, number : number + 1])
        return out.reshape(x.shape)


class Distinct(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.inner(x) / torch.unique(inputs.words).numel()


class CountNonzero(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        rows = (x > 0).nonzero()
        return self.inner(x) * (1 + len(rows)) / 50


class Noise(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.inner(x + 0.1 * torch.randn_like(x)) * (0.5 + torch.rand(x.shape[0], 1, 1))


class FunctionalDropout(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return F.dropout(self.inner(x), 0.3, self.training)


class StochasticDepth(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return x + self.inner(x) * (torch.rand(()) < 0.5)


class DrawnChoice(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.inner(x) if torch.rand(()).item() < 0.5 else x * 0.5


class PythonRandom(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.inner(x) * random.uniform(0.5, 1.0)


class Buffer(Part):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return self.inner(x) - self.average


class BatchSize(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.inner(x) + x.sum(0) / x.shape[0] + len(x) / 10


class ManySamples(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.inner(x) if x.shape[0] > 1 else x * 2


class Length(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.inner(x) + x.sum(1, keepdim=True) / inputs.words.shape[1]


class LongInput(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.inner(x) if x.size(1) > 4 else x * 2


class Item(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.inner(x) * (1 + abs(x.mean().item()))


class Condition(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.inner(x) if x.sum() > 0 else x * 2


class Numpy(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        lengths = np.maximum(inputs.mask.numpy().sum(1), 1)
        return self.inner(x) / torch.from_numpy(lengths).float()[:, None, None]


class GradientHook(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)
        return y


class ForwardHook(Part):
    def __init__(self) -> None:
        super().__init__()
        self.inner.register_forward_hook(lambda module, args, output: output * 2)


class InnerGradient(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.inner(leaf).square().sum(), leaf)
        return self.inner(x) + 0.01 * slope


PARTS = parts_in(globals())
