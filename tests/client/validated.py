"""A job that is validated while functions that are threads train it, and the same in one process."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import OnProgress, RunResult, ignore_progress
from funcpipe.client.prepare.evaluation import make_evaluation
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, Plan, RunLimits, RunSettings, ScheduleKind, Sync, Validation, Wire
from funcpipe.core.settings import NO_LIMITS
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.recipe import Recipe
from tests.support.plans import even_stages

RUN = "run-1"
STEADY = FaultTolerance(heartbeat_s=0.2, lease_s=30.0, checkpoint_steps=2, keep=True)
SAMPLES, HELD_OUT, BATCH, MICRO = 24, 14, 8, 2
"""The last batch that is held out is short, and so is its last micro-batch of two replicas' turns."""


class Net(nn.Module):
    """Does something else in eval mode in four ways: dropout twice, BatchNorm, and a head that only training has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(16, 16)
        self.aux = nn.Linear(16, 4)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The logits; in training, with a share of the auxiliary head's."""
        h = self.drop(torch.relu(self.norm(self.first(x))))
        h = functional.dropout(torch.relu(self.second(h)), 0.3, self.training)
        out: Tensor = self.last(h)
        return out + 0.1 * self.aux(h) if self.training else out


def net() -> Net:
    """The network, in double precision, always with the same weights."""
    torch.manual_seed(5)
    return Net().double()


def samples(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Vectors of six numbers, and their classes."""
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(6, generator=draw).double(), torch.tensor(i % 4)) for i in range(count)]


def data() -> list[tuple[Tensor, Tensor]]:
    """What is trained on."""
    return samples(SAMPLES, 1)


def held_out() -> list[tuple[Tensor, Tensor]]:
    """What is validated on."""
    return samples(HELD_OUT, 2)


def error_rate(output: Tensor, target: Tensor) -> Tensor:
    """The share of samples that are not classified right."""
    return (output.argmax(1) != target).double().mean()


def traced(model: nn.Module) -> LayerGraph:
    """The layers of `model`."""
    return trace(model, (torch.zeros(4, 6).double(),))


def plan(model: nn.Module, stages: int = 2, replicas: int = 2) -> Plan:
    """A plan of so many stages and replicas for `model`."""
    return _plan(tuple(layer.name for layer in traced(model).layers), stages, replicas)


def _plan(layers: Sequence[str], stages: int, replicas: int) -> Plan:
    return Plan(
        global_batch=BATCH,
        micro_batch=MICRO,
        replicas=replicas,
        schedule=ScheduleKind.ONE_F_ONE_B,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        platform="local",
        stages=even_stages(layers, stages),
    )


def job(
    validation: Validation,
    *,
    epochs: int = 2,
    stages: int = 2,
    replicas: int = 2,
    lr: float = 0.01,
    made: Callable[[], nn.Module] = net,
) -> Job:
    """Train what is `made`, validated as `validation` says."""
    model = made()
    graph = traced(model)
    own = _plan([layer.name for layer in graph.layers], stages, replicas)
    loss, steps = nn.functional.cross_entropy, -(-SAMPLES // BATCH)
    evaluation = make_evaluation(
        model,
        validation.data,
        own,
        loss=loss,
        metrics=validation.metrics,
        blocks=graph.blocks,
        every=validation.interval(steps),
        monitor=validation.watched,
    )
    return Job(
        graph=graph,
        plan=own,
        recipe=Recipe(loss=loss, optimizer=functools.partial(torch.optim.Adam, lr=lr)),
        dataset=data,
        samples=SAMPLES,
        epochs=epochs,
        seed=0,
        shuffle=True,
        message_deadline_s=300.0,
        prices=load_spec("local"),
        evaluation=evaluation,
    )


def run(
    made: Job,
    storage: Storage,
    functions: ThreadPlatform,
    *,
    settings: RunSettings | None = None,
    on_progress: OnProgress = ignore_progress,
    faults: FaultTolerance = STEADY,
    before: ThreadPlatform | None = None,
    lasts: bool = False,
    limits: RunLimits = NO_LIMITS,
) -> RunResult:
    """Train `made` on `functions`; those of the run that is resumed ran on the platform `before`. In a storage that
    `lasts`, its model is kept.
    """
    session = session_on(Site(functions, storage, "memory://"), reopen=(before or functions).open)
    session = dataclasses.replace(session, lasts=lasts)
    prepared = prepare(made, session, faults=faults, limits=limits, settings=settings or RunSettings(name=RUN))
    return launch(prepared, on_progress)


def evaluated(model: nn.Module, tensors: Mapping[str, Tensor], held: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """The outputs and targets of all micro-batches in one process, in eval mode, with these parameters."""
    copied = copy.deepcopy(model)
    copied.load_state_dict(dict(tensors))
    copied.eval()
    with torch.no_grad():
        for start in range(0, len(held), MICRO):
            inputs, targets = zip(*held[start : start + MICRO], strict=True)
            yield copied(torch.stack(inputs)), torch.stack(targets)


def mean_loss(model: nn.Module, tensors: Mapping[str, Tensor], held: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The mean loss over all samples in one process, in eval mode."""
    total = sum(
        nn.functional.cross_entropy(output, target).item() * len(target)
        for output, target in evaluated(model, tensors, held)
    )
    return float(total) / len(held)
