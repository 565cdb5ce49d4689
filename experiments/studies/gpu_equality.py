"""Whether ten kinds of networks, trained by plans on the device, have the bits of plain PyTorch on it.

Functions are threads of this process, which share the device. By one plan a worker is killed in the second step, and
repeats it; by another the first function of each worker hands over to a second one after a step.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcpipe.core import FaultTolerance, Plan, Precision, ScheduleKind
from funcpipe.testing.memory_storage import MemoryStorage
from tests.e2e import device_memory
from tests.e2e.networks import Lopsided, Network
from tests.e2e.plans import even_plan, momentum, sample_numbers
from tests.e2e.reference import largest_difference, train
from tests.in_process import Killing, make_job, run_workers, states

STEPS, BAG = 2, 5


class Running(nn.Module):
    """Divides by a running mean of sizes, which each forward leaves for the next one."""

    size: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.size.mul_(0.9).add_(x.detach().abs().mean(), alpha=0.1)
        return x / self.size


def carried() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 32), Running(), nn.ReLU(), nn.Linear(32, 32), Running(), nn.Linear(32, 10))


def bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(device_memory.WORDS, 64, mode="sum"), nn.Tanh(), nn.Linear(64, 10))


def bags(samples: int) -> tuple[Tensor, Tensor]:
    return device_memory.sentences(samples, BAG)[0], torch.arange(samples) % 10


def lopsided_vectors(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 5, generator=torch.Generator().manual_seed(6)), torch.arange(samples) % 5


OF_MEMORY = device_memory.NETWORKS
NETWORKS = {
    "mlp": OF_MEMORY["mlp"],
    "convolutions": OF_MEMORY["convolutions"],
    "residual": OF_MEMORY["residual"],
    "lopsided": Network(lambda: Lopsided(24, 6), F.cross_entropy, lopsided_vectors),
    "carried": Network(carried, F.cross_entropy, OF_MEMORY["mlp"].data),
    "transformer": OF_MEMORY["transformer"],
    "bf16": OF_MEMORY["transformer"],
    "tied": OF_MEMORY["tied"],
    "recurrent": OF_MEMORY["recurrent"],
    "bag": Network(bag, F.cross_entropy, bags),
}


@dataclass(frozen=True)
class Run:
    """Stages and replicas, and what happens to a worker meanwhile."""

    stages: int
    replicas: int
    fate: str


UNDISTURBED, KILLED, HANDED_OVER = "undisturbed", "killed", "handed over"
SPLIT = (Run(1, 1, UNDISTURBED), Run(2, 2, KILLED), Run(3, 1, HANDED_OVER))
ONE_REPLICA = (Run(1, 1, UNDISTURBED), Run(2, 1, KILLED), Run(3, 1, HANDED_OVER))
"""Over replicas, what norms count and forwards leave is averaged, which rounds otherwise than one process."""

ONE_STAGE = (Run(1, 1, UNDISTURBED), Run(1, 2, KILLED), Run(1, 1, HANDED_OVER))
"""In several stages, gradients of a parameter that these share are summed in another order than by one process."""

RUNS = dict.fromkeys(NETWORKS, SPLIT)
RUNS |= dict.fromkeys(("residual", "lopsided", "carried"), ONE_REPLICA) | {"tied": ONE_STAGE}


def rows(device: str, *, micro_batch: int) -> Iterator[dict[str, Any]]:
    """Yield each network and plan, how far it differs from plain training, and the seconds of both."""
    for name, runs in RUNS.items():
        for run in runs:
            yield row(name, run, device, micro_batch=micro_batch)


def row(name: str, run: Run, device: str, *, micro_batch: int) -> dict[str, Any]:
    """Train the network of that name by such a plan, and plainly."""
    network, precision = NETWORKS[name], Precision.BF16 if name == "bf16" else Precision.FP32
    plan = even_plan(
        made(network),
        (network.data(2)[0],),
        stages=run.stages,
        replicas=run.replicas,
        micro_batch=micro_batch,
        micro_batches=2,
        schedule=ScheduleKind.ONE_F_ONE_B,
        recompute=run.stages == 3,
    )
    samples = list(zip(*network.data(STEPS * plan.global_batch), strict=True))
    found, run_s = timed(lambda: by_plan(network, plan, samples, run, precision))
    expected, plain_s = timed(lambda: plainly(network, plan, samples, device, precision))
    return {
        "network": name,
        "stages": run.stages,
        "replicas": run.replicas,
        "fate": run.fate,
        "equal": all(torch.equal(found[key], tensor) for key, tensor in expected.items()),
        "difference": largest_difference(found, expected),
        "s": run_s,
        "plain_s": plain_s,
    }


def made(network: Network) -> nn.Module:
    """A network with the same parameters each time."""
    torch.manual_seed(1)
    return network.model()


def by_plan(network: Network, plan: Plan, samples: Sequence[Any], run: Run, precision: Precision) -> dict[str, Tensor]:
    """The state after training by `plan`."""
    last = r"s0\.r0/00000001/put-" + ("act" if run.stages > 1 else "split")
    storage = Killing(last) if run.fate == KILLED else MemoryStorage()
    recipe: dict[str, Any] = {"loss": network.loss, "optimizer": momentum, "precision": precision, "deadline_s": 120.0}
    job = make_job(made(network), plan, lambda: samples, **recipe)
    faults, hand_over = FaultTolerance(checkpoint_steps=1), run.fate == HANDED_OVER
    workers = run_workers(job, storage, accelerated=True, faults=faults, hand_over=hand_over)
    assert not (isinstance(storage, Killing) and storage.last), "no worker has died"
    return states(workers)


def plainly(
    network: Network, plan: Plan, samples: Sequence[Any], device: str, precision: Precision
) -> dict[str, Tensor]:
    """The state after plain training on the device."""
    model, loss, steps = made(network).to(device), network.loss, sample_numbers(plan, len(samples), epochs=1)
    if precision is Precision.BF16:
        cast = partial(torch.autocast, device, torch.bfloat16)
        model.forward, loss = cast()(model.forward), cast()(loss)
    own: dict[str, Any] = {"steps": steps, "replicas": plan.replicas, "device": device}
    train(model, samples, loss_fn=loss, optimizer=momentum, **own)
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def timed(work: Callable[[], dict[str, Tensor]]) -> tuple[dict[str, Tensor], float]:
    """What `work` returns, and its seconds."""
    began_s = time.monotonic()
    return work(), time.monotonic() - began_s
