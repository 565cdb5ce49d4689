"""Local steps in one process: replicas that train alone and meet every few steps, played one after the other.

`replicas` start a round from the same parameters theta. Each trains alone for `sync_every` steps on its own
micro-batches of each global batch, m being those of replica m mod `replicas`: its loss is the mean over its samples of
the step, its gradients are clipped by their own norm, and its optimiser and schedule, which it keeps, step once a step.
Then they meet (DiLoCo, Douillard et al., 2023):

    delta   = the sum over replicas, in the order of ranks, of theta - theta_r, divided by their number
    v       = mu v + delta                      v is 0 in the beginning
    theta  <- theta - eta (delta + mu v)        with mu = 0: theta - eta delta

and all go on from theta. For example, with eta = 1 and mu = 0.5, two replicas that go from 0 to -1 and -3, then from
where they are by as much again, one parameter each:

    round    theta    theta_0    theta_1    delta    v      theta after it
    1        0        -1         -3         2        2      0 - (2 + 0.5 * 2) = -3
    2        -3       -4         -6         2        3      -3 - (2 + 0.5 * 3) = -6.5

A running statistic of a norm becomes what one process has that runs the forwards of all replicas, step by step, in the
order of micro-batches. No replica reads it in a round, so what each forward adds to it can be kept until the end.

Nothing of this is shared with what functions run: no graph of tasks, no lanes, no collectives.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from funcpipe.core import Coupled, OnNan, Precision, checks
from funcpipe.errors import ModelError, PlanError
from funcpipe.model.draws import layer_seed, reseed
from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.modes import training_mode
from funcpipe.model.split.stage import trained_by
from funcpipe.training.batches import Step
from funcpipe.training.data import Collate, MapDataset
from funcpipe.training.loading import SeededDataset
from funcpipe.training.losses import seed_loss
from funcpipe.training.optimizers import call_factory
from funcpipe.training.plain import detached_copy
from funcpipe.training.plain_loop import seeded
from funcpipe.training.recipe import LrSchedule, Recipe

Tensors = dict[str, Tensor]
"""Tensors by the names of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps:
    """How often replicas meet, and how far they go then; with `sync_every` None they meet once, at the end."""

    sync_every: int | None
    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.sync_every is not None:
            checks.at_least("sync_every", self.sync_every, 1)
        checks.positive("outer_lr", self.outer_lr)
        checks.at_least("outer_momentum", self.outer_momentum, 0)

    def rounds(self, steps: Sequence[Step], ends: Collection[int] = ()) -> Iterator[Sequence[Step]]:
        """Yield the steps of each round, which ends besides after the steps with the numbers `ends`, and the last one.

        With `sync_every` 3, seven steps and an end after step 1: steps 0 and 1, 2 to 4, 5 and 6.
        """
        first = 0
        for position, step in enumerate(steps):
            done = position + 1 - first
            if done == self.sync_every or step.number in ends or position + 1 == len(steps):
                yield steps[first : position + 1]
                first = position + 1


def added_in_order(contributions: Sequence[Tensors]) -> Tensors:
    """Return the sums of what each rank contributes, added in the order of ranks."""
    total = {name: values.clone() for name, values in contributions[0].items()}
    for contribution in contributions[1:]:
        for name, values in contribution.items():
            total[name].add_(values)
    return total


def train_in_turn(
    model: nn.Module,
    graph: LayerGraph,
    dataset: MapDataset,
    steps: Sequence[Step],
    *,
    recipe: Recipe,
    seed: int,
    replicas: int,
    local: LocalSteps,
    ends: Collection[int] = (),
    collate: Collate | None = None,
    add: Callable[[Sequence[Tensors]], Tensors] = added_in_order,
) -> nn.Module:
    """Return a copy of `model`, trained in `steps` by `replicas` that meet as `local` says, and after the steps `ends`.

    `add` sums what replicas contribute to a meeting; give another one to round in the places where a format does.
    Raises PlanError for recipes, and ModelError for models, whose replicas cannot meet.
    """
    _check(recipe)
    alone = [_Replica(model, graph, dataset, recipe, seed, (rank, replicas), collate) for rank in range(replicas)]
    theta = {name: values.detach().clone() for name, values in alone[0].parameters.items()}
    velocity = {name: torch.zeros_like(values) for name, values in theta.items()}
    for steps_of_round in local.rounds(steps, ends):
        for replica in alone:
            for step in steps_of_round:
                replica.train(step)
        total = add([{name: theta[name] - own.detach() + 0.0 for name, own in one.parameters.items()} for one in alone])
        for name, values in theta.items():
            delta = total[name] / replicas
            if local.outer_momentum:
                velocity[name].mul_(local.outer_momentum).add_(delta)
                delta = delta + local.outer_momentum * velocity[name]
            values.sub_(local.outer_lr * delta)
        statistics = _joined_statistics(alone)
        for replica in alone:
            replica.go_on_from(theta, statistics)
        _check_buffers(alone)
    return alone[0].model


@dataclass(frozen=True)
class _Forward:
    """What a forward of micro-batch `number` adds to the statistics of norms, and how often it has called each norm."""

    step: int
    number: int
    added: Mapping[str, tuple[Tensor, Tensor]]
    calls: Mapping[str, int]


class _Replica:
    """A copy of the model and of the loss, with an optimiser and a schedule of its own."""

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        dataset: MapDataset,
        recipe: Recipe,
        seed: int,
        place: tuple[int, int],
        collate: Collate | None,
    ) -> None:
        self.model = detached_copy(model)
        loss = recipe.loss
        self._recipe = replace(recipe, loss=detached_copy(loss) if isinstance(loss, nn.Module) else copy.deepcopy(loss))
        own = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters: dict[str, nn.Parameter] = {**own, **trained_by(self._recipe.loss)}
        self.optimizer = call_factory(recipe.optimizer, list(self.parameters.items()))
        self._schedule = None if recipe.scheduler is None else LrSchedule(recipe, self.optimizer)
        self._graph, self._dataset, self._seed, self._collate = graph, dataset, seed, collate
        self._rank, self._replicas = place
        with training_mode(self.model, caches=True):
            self.norms = {name: module for name, module in self.model.named_modules() if _can_join(module)}
        self.statistics = {name: tuple(value.clone() for value in _running(norm)) for name, norm in self.norms.items()}
        self.forwards: list[_Forward] = []

    def train(self, step: Step) -> None:
        """Train on this replica's micro-batches of `step`."""
        own = {m: indices for m, indices in enumerate(step.micro_batches) if m % self._replicas == self._rank}
        samples = sum(map(len, own.values()))
        self.optimizer.zero_grad()
        with training_mode(self.model, caches=True):
            for number, indices in own.items():
                self._add_gradients(step, number, indices, len(indices) / samples)
        recipe = self._recipe
        if recipe.clip_grad_norm is not None:
            self._clip_norm(recipe.clip_grad_norm)
        if recipe.clip_grad_value is not None and any(p.grad is not None for p in self.parameters.values()):
            nn.utils.clip_grad_value_(self.parameters.values(), recipe.clip_grad_value)
        reseed(layer_seed(self._seed, step.number, 0, "optimizer"))
        self.optimizer.step()
        if self._schedule is not None:
            self._schedule.after_step(step)

    def _clip_norm(self, largest: float) -> None:
        """As torch.nn.utils.clip_grad_norm_, but with a norm in double precision, as functions compute it."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = math.sqrt(math.fsum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in gradients))
        if (factor := largest / (norm + 1e-6)) < 1:
            for gradient in gradients:
                gradient.mul_(factor)

    def _add_gradients(self, step: Step, number: int, indices: Sequence[int], share: float) -> None:
        batch = SeededDataset(self._dataset, self._seed, step.epoch).batch(indices, self._collate)
        before = {}
        for name, norm in self.norms.items():
            mean, variance, count = _running(norm)
            mean.zero_()
            variance.zero_()
            before[name] = int(count)
        drawing = seeded(self.model, self._graph, self._seed, step.number, number)
        with drawing:
            output = self.model(*batch.args, **batch.kwargs)
        found = {name: _running(norm) for name, norm in self.norms.items()}
        self.forwards.append(
            _Forward(
                step.number,
                number,
                {name: (mean.clone(), variance.clone()) for name, (mean, variance, _) in found.items()},
                {name: int(count) - before[name] for name, (_, _, count) in found.items()},
            )
        )
        seed_loss(self._seed, step.number, number)
        loss = self._recipe.cast_loss(output, batch.target) * share
        if loss.requires_grad:
            with drawing:
                torch.autograd.backward(loss)

    @torch.no_grad()
    def go_on_from(self, theta: Mapping[str, Tensor], statistics: Mapping[str, tuple[Tensor, ...]]) -> None:
        """Take the parameters and statistics on which all have met."""
        for name, parameter in self.parameters.items():
            parameter.copy_(theta[name])
        for name, values in statistics.items():
            for own, met in zip(_running(self.norms[name]), values, strict=True):
                own.copy_(met)
        self.statistics = {name: tuple(value.clone() for value in values) for name, values in statistics.items()}
        self.forwards = []


def _can_join(module: nn.Module) -> bool:
    """Return True for a norm whose every call moves its statistics by the same share."""
    if not isinstance(module, _NormBase) or not module.training:
        return False
    return module.running_mean is not None and module.momentum is not None


def _running(norm: nn.Module) -> tuple[Tensor, ...]:
    """The running mean, the running variance, and the count of calls: the buffers themselves."""
    return tuple(norm.get_buffer(name) for name in ("running_mean", "running_var", "num_batches_tracked"))


def _joined_statistics(alone: Sequence[_Replica]) -> dict[str, tuple[Tensor, ...]]:
    """Return the statistics of a process that has run the forwards of all replicas, in order."""
    forwards = sorted((f for replica in alone for f in replica.forwards), key=lambda f: (f.step, f.number))
    joined: dict[str, tuple[Tensor, ...]] = {}
    for name, norm in alone[0].norms.items():
        mean, variance, count = (value.clone() for value in alone[0].statistics[name])
        for forward in forwards:
            kept = (1 - norm.momentum) ** forward.calls[name]
            mean.mul_(kept).add_(forward.added[name][0])
            variance.mul_(kept).add_(forward.added[name][1])
            count += forward.calls[name]
        joined[name] = (mean, variance, count)
    return joined


def _check(recipe: Recipe) -> None:
    """Raise PlanError for what has no meaning where replicas train alone, or is decided by all of them together."""
    refused = {
        "coupled=cache: its loss is that of a whole global batch": recipe.coupled is Coupled.CACHE,
        "teachers: they average the parameters after every step": bool(recipe.teachers),
        "average: it averages the parameters after every step": recipe.average is not None,
        "a loss with weights: it is divided by those of a whole global batch": recipe.is_weighted,
        "on_nan=skip: all replicas leave out a step": recipe.on_nan is OnNan.SKIP,
        "precision=fp16: all replicas share the scale of losses": recipe.precision.scales_loss,
        f"precision={recipe.precision.value}: this reference computes in fp32": recipe.precision is not Precision.FP32,
    }
    for reason, is_so in refused.items():
        if is_so:
            raise PlanError(f"replicas that meet every few steps do not allow {reason}; train with sync_every=1")


def _check_buffers(alone: Sequence[_Replica]) -> None:
    """Raise ModelError if replicas have come to other values of a buffer that is no statistic of a norm."""
    first = dict(alone[0].model.named_buffers())
    for rank, replica in enumerate(alone[1:], start=1):
        for name, buffer in replica.model.named_buffers():
            if not torch.equal(buffer, first[name]):
                raise ModelError(
                    f"buffer {name} differs between replicas 0 and {rank} after steps that each took alone; only "
                    "running statistics of norms can be joined: train with sync_every=1, or keep the value elsewhere"
                )
