"""Models with norms of all kinds, and what a script does that accumulates gradients over micro-batches."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.jobs.scripts import EQUAL, Script, run_over_functions, worst_difference

WIDTH = 6


def samples(number: int = 27) -> list[tuple[Tensor, Tensor]]:
    """The last global batch has fewer micro-batches, the last of which is smaller.

    In double precision, as a chain of norms over a few samples each amplifies rounding.
    """
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(WIDTH, generator=generator).double() * 2 + 1, torch.tensor(i % 3)) for i in range(number)]


def chain(*norms: nn.Module) -> nn.Module:
    """Each norm behind a linear layer of its own."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), norm, nn.Tanh()) for norm in norms]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 3))


def script_of(make: Callable[[], nn.Module], **settings: Any) -> Script:
    return Script(make=lambda: (make().double(), F.cross_entropy), samples=samples, **settings)


def accumulated(script: Script) -> nn.Module:
    """The model after a script that accumulates gradients over the micro-batches of each global batch, in order."""
    model, loss = script.made()
    optimizer = script.optimizer(model.parameters())
    rows = script.samples()
    for start in range(0, len(rows), script.global_batch):
        batch = rows[start : start + script.global_batch]
        optimizer.zero_grad()
        for first in range(0, len(batch), script.micro_batch):
            part = batch[first : first + script.micro_batch]
            x, target = (torch.stack(tensors) for tensors in zip(*part, strict=True))
            (loss(model(x), target) * (len(part) / len(batch))).backward()
        optimizer.step()
    return model


def assert_equal(script: Script, **plan: Any) -> None:
    worst, name = worst_difference(script, run_over_functions(script, **plan), accumulated(script))
    assert worst < EQUAL, f"{name}: {worst}"


class AsImages(nn.Module):
    """An InstanceNorm over vectors that are seen as two channels."""

    def __init__(self, norm: nn.Module, calls: int = 1) -> None:
        super().__init__()
        self.norm = norm
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 2, -1)
        for _ in range(self.calls):
            x = self.norm(x) + 0.5 * x
        return x.flatten(1)


def instance_norm(**settings: Any) -> nn.Module:
    return nn.InstanceNorm1d(2, affine=True, track_running_stats=True, **settings)


class Twice(nn.Module):
    """One norm, called for two inputs in each forward."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.norm(2 * x.abs())  # type: ignore[no-any-return]


def eval_norm() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)
    norm.running_var = torch.full((WIDTH,), 3.0)
    return norm.eval()


class LookAlike(nn.Module):
    """A norm of the user's own, of the same rule."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, momentum: float = 0.2) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("running_var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(0), x.var(0, unbiased=False)
        if self.training:
            self.running_mean.mul_(1 - self.momentum).add_(self.momentum * mean.detach())
            self.running_var.mul_(1 - self.momentum).add_(self.momentum * var.detach())
        return (x - mean) / (var + 1e-5).sqrt()


def every_norm() -> nn.Module:
    """A model with norms of all settings, whose statistics replicas can add up."""
    return chain(
        nn.BatchNorm1d(WIDTH, momentum=0.3),
        nn.BatchNorm1d(WIDTH, momentum=None),
        nn.BatchNorm1d(WIDTH, momentum=0.0),
        nn.BatchNorm1d(WIDTH, momentum=1.0, affine=False),
        eval_norm(),
        Twice(nn.BatchNorm1d(WIDTH)),
        Twice(nn.BatchNorm1d(WIDTH, momentum=None)),
        nn.SyncBatchNorm(WIDTH),
        AsImages(instance_norm()),
        AsImages(instance_norm(momentum=0.4), calls=2),
        AsImages(instance_norm(momentum=None)),
        LookAlike(),
    )


class ReadsStatistics(nn.Module):
    """The norm's output depends on the statistics of the micro-batches before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        drift = self.norm.get_buffer("running_var").mean()
        output: Tensor = self.norm(x) * (1 + 0.1 * drift)
        return output


class Penalised(nn.Module):
    """The output depends on all statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = chain(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                output = output * (1 + 0.01 * module.get_buffer("running_mean").square().sum())
        return output


class ReadsFirst(nn.Module):
    """Begins by reading statistics that modules change later on, and uses what it has read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.body = chain(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        drift = self.body.get_buffer("0.1.running_var").mean()
        output: Tensor = self.body(self.first(x).relu()) * (1 + drift)
        return output


class Renorm(nn.Module):
    """Batch Renormalization: the output is corrected by running statistics, more and more as calls are counted."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.momentum = 0.1
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("running_var", torch.ones(WIDTH))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(0), x.var(0, unbiased=False)
        std, running_std = (var + 1e-5).sqrt(), (self.running_var + 1e-5).sqrt()
        limit = 1 + (self.num_batches_tracked.float() / 4).clamp(max=2)
        r = torch.minimum(std.detach() / running_std, limit)
        d = torch.minimum((mean.detach() - self.running_mean) / running_std, limit - 1)
        self.running_mean.lerp_(mean.detach(), self.momentum)
        self.running_var.lerp_(var.detach(), self.momentum)
        self.num_batches_tracked.add_(1)
        return (x - mean) / std * r + d


class ByRunning(nn.BatchNorm1d):
    """Normalises by its running statistics in training too, once it has updated them."""

    def forward(self, input: Tensor) -> Tensor:
        super().forward(input)
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class Copies(nn.Module):
    """Keeps a slow average of the statistics, which nothing reads."""

    slow: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("slow", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.slow.lerp_(self.norm.get_buffer("running_mean"), 0.1)
        output: Tensor = self.norm(x)
        return output


class Clipped(LookAlike):
    """Does not let its running mean move far at a time."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.running_mean.clone()
        output = super().forward(x)
        self.running_mean.copy_(before + (self.running_mean - before).clamp(-0.02, 0.02))
        return output
