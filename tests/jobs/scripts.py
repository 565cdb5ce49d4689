"""Small jobs, each trained as a user's script trains it, on whole batches, and over functions.

The script uses the user's own model, loss, optimiser and collate function, and nothing of funcpipe.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from funcpipe.client.prepare.job import Job, Learner, SampleOrder, make_job
from funcpipe.core import OptimizerKind, Plan, RunSettings, ScheduleKind, Sync, Wire
from funcpipe.model.graph import trace
from funcpipe.model.tensors import flatten
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.data_source import data_source
from funcpipe.training.first_batch import FirstBatch, first_batch
from funcpipe.training.recipe import recipe_with
from funcpipe.training.verify import TOLERANCE, Verification, verify_run
from tests.in_process import run_workers
from tests.support.plans import even_stages

SGD: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.05, momentum=0.9)

EQUAL = 1e-4
"""The largest difference, as a share of the largest change by training, at which tensors count as equal."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A user's script: `make` returns its model and its loss; a sample is a tuple with the target last.

    `enter` prepares the model for training, `before_step` is told the parameters once their gradients are there.
    `recipe` are keywords of FuncPipe that have the same effect as what the script itself does.
    """

    make: Callable[[], tuple[nn.Module, Any]]
    samples: Callable[[], Any]
    optimizer: Callable[..., torch.optim.Optimizer] = SGD
    collate: Callable[[list[Any]], Any] | None = None
    micro_batch: int = 4
    global_batch: int = 16
    epochs: int = 1
    enter: Callable[[nn.Module], Any] = lambda model: model.train()
    before_step: Callable[[list[nn.Parameter]], Any] = lambda parameters: None
    recipe: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_cached(self) -> bool:
        """Whether the loss is computed from the outputs of all micro-batches."""
        return self.recipe.get("coupled") == "cache"

    def made(self) -> tuple[nn.Module, Any]:
        """The model and the loss, always with the same weights."""
        torch.manual_seed(0)
        return self.make()


def run_script(
    script: Script, *, loss_of: Callable[[Any], Tensor] = lambda found: found, cut: bool = False
) -> tuple[nn.Module, Any]:
    """The model and the loss after the script; `loss_of` gives the number to minimise from what the loss returns.

    With `cut`, the loss of a global batch is that of its micro-batches: a mean over their samples, or, of pairs of a
    sum and a weight, the sums over the weights. With outputs that are cached, it is that of all of them together.
    """
    model, loss = script.made()
    script.enter(model)
    trained = [*model.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else [])]
    trained = [parameter for parameter in trained if parameter.requires_grad]
    optimizer = script.optimizer(trained)
    samples, size = script.samples(), script.micro_batch if cut else script.global_batch
    for _ in range(script.epochs):
        for first in range(0, len(samples), script.global_batch):
            batch = [samples[i] for i in range(first, min(first + script.global_batch, len(samples)))]
            optimizer.zero_grad()
            parts = [batch[begin : begin + size] for begin in range(0, len(batch), size)]
            pairs: list[Any] = []
            for part in parts:
                *inputs, target = default_collate(part) if script.collate is None else script.collate(part)
                pairs.append((model(*inputs), target))
            if script.is_cached and len(parts) > 1:
                pairs = [tuple(map(torch.cat, zip(*pairs, strict=True)))]
            found = [loss(output, target) for output, target in pairs]
            torch.autograd.backward(loss_of(_joined(found, [len(part) for part in parts])))
            script.before_step(trained)
            optimizer.step()
    return model, loss


def _joined(found: list[Any], sizes: list[int]) -> Any:
    """What the loss of a batch is, by what it is for its parts."""
    if len(found) == 1:
        return found[0]
    if isinstance(found[0], tuple):
        return sum(part for part, _ in found), sum(weight for _, weight in found)
    return sum(part * size for part, size in zip(found, sizes, strict=True)) / sum(sizes)


def run_over_functions(
    script: Script,
    *,
    stages: int = 2,
    replicas: int = 1,
    schedule: ScheduleKind = ScheduleKind.GPIPE,
    recompute: bool = False,
    plan_changes: Mapping[str, Any] = {},
) -> dict[str, Tensor]:
    """All tensors of the stages by name, those of the loss below "<loss>", after the same steps over threads.

    `plan_changes` are fields of the plan. Everything is checked first as `FuncPipe.train` does it. Threads share a
    random number generator, so nothing may draw.
    """
    model, loss = script.made()
    return _trained(_job(script, model, loss, stages, replicas, schedule, recompute, plan_changes))


def verify(script: Script, *, stages: int = 2, replicas: int = 1, plan_changes: Mapping[str, Any] = {}) -> Verification:
    """What `FuncPipe.verify` finds of the script's job, by the same functions."""
    model, loss = script.made()
    job = _job(script, model, loss, stages, replicas, ScheduleKind.GPIPE, recompute=False, plan_changes=plan_changes)
    return verify_run(_trained(job), job.plain_training(model), steps=job.steps, tolerance=TOLERANCE)


def job_of(
    script: Script,
    *,
    stages: int = 2,
    replicas: int = 1,
    schedule: ScheduleKind = ScheduleKind.GPIPE,
    recompute: bool = False,
) -> Job:
    """The script's job, checked as `FuncPipe.train` does it."""
    model, loss = script.made()
    return _job(script, model, loss, stages, replicas, schedule, recompute)


def _job(
    script: Script,
    model: nn.Module,
    loss: Any,
    stages: int,
    replicas: int,
    schedule: ScheduleKind,
    recompute: bool,
    plan_changes: Mapping[str, Any] = {},
) -> Job:
    data = DataLoader(script.samples(), batch_size=script.micro_batch, collate_fn=script.collate)
    first = first_batch(script.samples(), script.micro_batch, data_source(data).options.collate, model)
    names = _layer_names(model, first)
    plan = Plan(
        global_batch=script.global_batch,
        micro_batch=script.micro_batch,
        replicas=replicas,
        schedule=schedule,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        optimizer=OptimizerKind.MOMENTUM,
        joint_loss=script.is_cached,
        platform="local",
        stages=even_stages(names, stages, recompute=recompute),
    )
    plan = replace(plan, **plan_changes)
    learner = Learner(model=model, recipe=recipe_with(loss, script.optimizer, dict(script.recipe)))  # type: ignore[arg-type]
    order = SampleOrder(epochs=script.epochs, shuffle=False)
    return make_job(learner, data, plan, order, RunSettings())


_names: dict[str, tuple[str, ...]] = {}


def _layer_names(model: nn.Module, first: FirstBatch) -> tuple[str, ...]:
    """Of models that look alike they are found once: were they others, no job would accept the plan."""
    leaves, tree = flatten((first.batch.args, first.batch.kwargs))
    dense = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_nested]
    shapes = len(leaves), [(leaf.shape, leaf.dtype) for leaf in dense]
    plain = [(k, v) for part in model.modules() for k, v in vars(part).items() if isinstance(v, bool | int | str)]
    looks = f"{type(model).__module__} {type(model).__qualname__} {model} {plain} {shapes} {tree}"
    if looks not in _names:
        graph = trace(model, first.batch.args, first.batch.kwargs, collated=first.collated)
        _names[looks] = tuple(layer.name for layer in graph.layers)
    return _names[looks]


def _trained(job: Job) -> dict[str, Tensor]:
    workers = run_workers(job, MemoryStorage())
    states = [worker.computation.state() for worker in workers.values()]
    found = {name: tensor for state in states for name, tensor in state.state_dict().items()}
    return found | {f"<loss>.{n}": tensor for state in states for n, tensor in state.loss_state_dict().items()}


def worst_difference(script: Script, found: Mapping[str, Tensor], expected: nn.Module) -> tuple[float, str]:
    """The largest difference of a tensor of the model from the `expected` one, and its name.

    It is a share of the largest change of the tensor by training, or of its largest element if it has not changed.
    """
    start = script.made()[0].state_dict()
    worst = 0.0, ""
    for name, tensor in expected.state_dict().items():
        end = tensor.double()
        change = float((end - start[name].double()).abs().max()) or float(end.abs().max()) or 1.0
        worst = max(worst, (float((found.get(name, start[name]).double() - end).abs().max()) / change, name))
    return worst
