"""What stages hold on a device at their peak, counted there and as the cost model has it, for networks of six kinds."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcpipe.core import MB, OptimizerKind, Plan, StageEstimate
from funcpipe.model.graph import trace
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.platforms.catalog import load_spec
from funcpipe.profiler.profile import profile
from funcpipe.testing.memory_storage import MemoryStorage
from tests.e2e.networks import Block, Network, Residual
from tests.e2e.plans import even_plan, momentum
from tests.in_process import GPU, make_job, run_workers

WIDTH, LENGTH, WORDS, CLASSES = 64, 32, 96, 10

adam = partial(torch.optim.AdamW, lr=0.01)


def mlp(width: int = 128) -> nn.Module:
    layers = [layer for _ in range(5) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(128, width), nn.ReLU(), *layers, nn.Linear(width, CLASSES))


def convolutions(channels: int = 16) -> nn.Module:
    twice = 2 * channels
    first = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, twice, 3, padding=1), nn.ReLU()]
    second = [nn.MaxPool2d(2), nn.Conv2d(twice, twice, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(twice * 64, CLASSES))


def residual(channels: int = 16) -> nn.Module:
    twice = 2 * channels
    blocks = [Residual(channels, channels), Residual(channels, twice, 2), Residual(twice, twice)]
    stem = [nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(twice, CLASSES))


def transformer(width: int = WIDTH) -> nn.Module:
    """A language model of two blocks, with dropout before and in them."""
    blocks = [Block(width), Block(width)]
    return nn.Sequential(
        nn.Embedding(WORDS, width), nn.Dropout(0.1), *blocks, nn.LayerNorm(width), nn.Linear(width, WORDS)
    )


class Tied(nn.Module):
    """An embedding whose table is the head's, too; most of what it keeps is the loss's."""

    def __init__(self, words: int = 5 * WORDS) -> None:
        super().__init__()
        self.words = nn.Embedding(words, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(torch.tanh(self.inner(self.words(x)))))
        return output


class Recurrent(nn.Module):
    """Two recurrent layers, which hold weak references to their weights."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.inner = nn.RNN(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.inner(self.words(x))[0])
        return output


def vectors(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 128, generator=torch.Generator().manual_seed(2)), torch.arange(samples) % CLASSES


def images(samples: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(samples, 3, 16, 16, generator=draw), torch.arange(samples) % CLASSES


def sentences(samples: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    text = torch.randint(WORDS, (samples, length + 1), generator=torch.Generator().manual_seed(4))
    return text[:, :-1], text[:, 1:]


def words_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


NETWORKS = {
    "mlp": Network(mlp, F.cross_entropy, vectors),
    "convolutions": Network(convolutions, F.cross_entropy, images),
    "residual": Network(residual, F.cross_entropy, images),
    "transformer": Network(transformer, words_loss, sentences),
    "tied": Network(Tied, words_loss, sentences),
    "recurrent": Network(Recurrent, words_loss, partial(sentences, length=8)),
}


@dataclass(frozen=True)
class Peak:
    """Bytes of tensors on the device at the peak of a stage: as predicted, and as counted there.

    What the allocator of a GPU loses between tensors, an eighth of what passes hold, is in neither: a device does not
    count it as allocated.
    """

    predicted_bytes: int
    counted_bytes: int

    @property
    def off(self) -> float:
        """By which share of what was counted the prediction is too high."""
        return self.predicted_bytes / self.counted_bytes - 1


def peak(network: Network, device: str, *, optimizer: Any = momentum, micro_batch: int = 4, **options: Any) -> Peak:
    """Train the network as one stage for two steps of three micro-batches on the device of this process."""
    kind = OptimizerKind.ADAM if optimizer is adam else OptimizerKind.MOMENTUM
    settings = {"stages": 1, "replicas": 1, "micro_batches": 3, **options}
    sample = (network.data(2)[0],)
    plan = replace(even_plan(network.model(), sample, micro_batch=micro_batch, **settings), optimizer=kind)
    samples = list(zip(*network.data(2 * plan.global_batch), strict=True))
    job = make_job(network.model(), plan, lambda: samples, loss=network.loss, optimizer=optimizer)
    module = torch.get_device_module(device)
    gc.collect()
    before: int = module.memory_allocated()
    run_workers(job, MemoryStorage(), accelerated=True)
    return Peak(predicted(network, plan), module.max_memory_allocated() - before)


def predicted(network: Network, plan: Plan) -> int:
    """What tensors of the one stage of `plan` hold on a GPU at their peak."""
    device = memory_use(network, plan)[0].device
    assert device is not None
    return device.state_bytes + device.activation_bytes


def memory_use(network: Network, plan: Plan) -> Sequence[StageEstimate]:
    """What each function of `plan` needs of the host, and of its GPU."""
    spec = load_spec("local")
    spec = replace(spec, sizes=tuple(replace(size, accelerator=GPU) for size in spec.sizes))
    inputs, targets = network.data(plan.micro_batch)

    def loss(output: Tensor) -> Tensor:
        return network.loss(output, targets)

    with mock.patch("funcpipe.profiler.profile.base_memory_bytes", return_value=200 * MB):  # or a process measures it
        found = profile(
            trace(network.model(), (inputs,)), (inputs,), spec=spec, micro_batch=plan.micro_batch, loss=loss, repeats=0
        )
    return evaluate(plan, found, spec).stages
