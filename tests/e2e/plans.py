"""Plans made by hand, cutting a model's layers evenly."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from funcpipe.core import OptimizerKind, Plan, ScheduleKind, Sync, Wire
from funcpipe.model.graph import trace
from funcpipe.training.batches import Batches
from tests.support.plans import even_stages

momentum: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def even_plan(
    model: nn.Module,
    sample: tuple[torch.Tensor, ...],
    *,
    stages: int,
    replicas: int,
    micro_batch: int,
    micro_batches: int,
    recompute: bool = False,
    sync: Sync = Sync.PIPELINED,
    wire: Wire = Wire.FP32,
    wire_back: Wire | None = None,
    wire_sync: Wire = Wire.FP32,
    schedule: ScheduleKind = ScheduleKind.GPIPE,
) -> Plan:
    """`micro_batches` is the number of each replica."""
    return Plan(
        global_batch=micro_batch * micro_batches * replicas,
        micro_batch=micro_batch,
        replicas=replicas,
        schedule=schedule,
        sync=sync,
        wire=wire,
        wire_back=wire_back,
        wire_sync=wire_sync,
        optimizer=OptimizerKind.MOMENTUM,
        platform="local",
        stages=even_stages(_layer_names(model, sample), stages, recompute=recompute),
    )


_names: dict[str, list[str]] = {}


def _layer_names(model: nn.Module, sample: tuple[torch.Tensor, ...]) -> list[str]:
    """Of models that look alike they are found once: were they others, no job would accept the plan."""
    looks = f"{type(model).__module__} {type(model).__qualname__} {model} {[(x.shape, x.dtype) for x in sample]}"
    if looks not in _names:
        _names[looks] = [layer.name for layer in trace(model, sample).layers]
    return _names[looks]


def sample_numbers(plan: Plan, samples: int, epochs: int, seed: int = 0) -> list[tuple[tuple[int, ...], ...]]:
    """The sample numbers of each micro-batch of each step."""
    batches = Batches(samples=samples, global_batch=plan.global_batch, micro_batch=plan.micro_batch, seed=seed)
    return [step.micro_batches for epoch in range(epochs) for step in batches.epoch(epoch)]
