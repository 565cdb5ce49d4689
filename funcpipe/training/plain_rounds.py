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

Parameters may meet in F fragments, each as above in rounds of its own: those of fragment f end f sync_every / F steps
later, rounded down. All rounds end where they must. With sync_every = 4 and F = 2, fragment 1 meets after 2, 6, 10, …
steps, and fragment 0 after 4, 8, …

With a delay of k steps, delta is what it was when the round ended, but theta moves k steps later, when replica r has
gone on from theta_r, as it was measured, to theta_r + p. Then it goes on from theta + p: what it has trained meanwhile
stays, and counts in the next round, which has begun with the measuring. Where all rounds end, theta moves at once, and
then all meet without a delay.

A running statistic of a norm meets with fragment 0. It becomes what one process has that runs the forwards of all
replicas, step by step, in the order of micro-batches. No replica reads it in a round, so what each forward adds to it
can be kept until the end.

Nothing of this is shared with what functions run: no graph of tasks, no lanes, no collectives. A run over functions has
the same bits, but for running statistics, which it averages in another order.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from funcpipe.core import Plan, checks
from funcpipe.errors import ModelError
from funcpipe.model.draws import layer_seed, reseed
from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.modes import training_mode
from funcpipe.model.graph.program import autocast_to
from funcpipe.model.split.stage import trained_by
from funcpipe.training.batches import Step
from funcpipe.training.data import Collate, MapDataset
from funcpipe.training.loading import SeededDataset
from funcpipe.training.losses import LossFunction, seed_loss
from funcpipe.training.optimizers import call_factory
from funcpipe.training.parameter_hooks import hook_seed, hooked, hooks_of
from funcpipe.training.plain_loop import detached_copy, seeded
from funcpipe.training.recipe import LrSchedule, Recipe, check_alone

Tensors = dict[str, Tensor]
"""Tensors by the names of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps:
    """How often replicas meet, and how far they go then; with `sync_every` None they meet once, at the end.

    They do so in `fragments` parts: `fragment_of` has the number of each parameter's, by name; 0 of those it leaves
    out. What they meet on reaches them `delay` steps later.
    """

    sync_every: int | None
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    fragments: int = 1
    fragment_of: Mapping[str, int] = field(default_factory=dict)
    delay: int = 0

    def __post_init__(self) -> None:
        if self.sync_every is not None:
            checks.at_least("sync_every", self.sync_every, 1)
        checks.at_least("fragments", self.fragments, 1)
        checks.positive("outer_lr", self.outer_lr)
        checks.at_least("outer_momentum", self.outer_momentum, 0)

    @classmethod
    def of(cls, plan: Plan, fragment_of: Mapping[str, int]) -> "LocalSteps | None":
        """Return how often the replicas of `plan` meet; None if they sum gradients in every step."""
        if not plan.trains_locally:
            return None
        return cls(
            sync_every=None if isinstance(plan.sync_every, str) else plan.sync_every,
            outer_lr=plan.outer_lr,
            outer_momentum=plan.outer_momentum,
            fragments=plan.sync_fragments,
            fragment_of=fragment_of,
            delay=plan.sync_delay,
        )

    def meetings(self, steps: Sequence[Step], ends: Collection[int] = ()) -> Iterator[tuple[Step, tuple[int, ...]]]:
        """Yield each step with the fragments that meet after it: all after the last one and those with numbers `ends`.

        With `sync_every` 3, seven steps and an end after step 1, the only fragment meets after 1, 4 and 6.
        """
        done = 0
        for position, step in enumerate(steps):
            done += 1
            if step.number in ends or position + 1 == len(steps):
                yield step, tuple(range(self.fragments))
                done = 0
            else:
                yield step, tuple(number for number in range(self.fragments) if self._is_due(number, done))

    def _is_due(self, fragment: int, done: int) -> bool:
        """Return True if a fragment meets when so many steps have been done since the rounds of all have ended."""
        every = self.sync_every
        return every is not None and done % every == fragment * every // self.fragments

    def of_fragment(self, fragment: int, tensors: Tensors) -> Tensors:
        """Return those of `tensors` that are in a fragment."""
        return {name: values for name, values in tensors.items() if self.fragment_of.get(name, 0) == fragment}


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
    job = Rounds(model=model, graph=graph, dataset=dataset, steps=steps, recipe=recipe, seed=seed, collate=collate)
    return job.train(replicas, local, ends, add)[0]


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The training that replicas do. `after_backward` is called when a replica has all gradients of a step."""

    model: nn.Module
    graph: LayerGraph
    dataset: MapDataset
    steps: Sequence[Step]
    recipe: Recipe
    seed: int
    collate: Collate | None = None
    after_backward: Callable[[nn.Module, LossFunction], None] = lambda model, loss: None

    def train(
        self,
        replicas: int,
        local: LocalSteps,
        ends: Collection[int] = (),
        add: Callable[[Sequence[Tensors]], Tensors] = added_in_order,
    ) -> tuple[nn.Module, LossFunction]:
        """Return trained copies of the model and of the loss; arguments and errors are those of `train_in_turn`."""
        check_alone(self.recipe)
        alone = [_Replica(self, rank, replicas) for rank in range(replicas)]
        theta = {name: values.detach().clone() for name, values in alone[0].parameters.items()}
        velocity = {name: torch.zeros_like(values) for name, values in theta.items()}
        late: _Late | None = None
        for position, (step, fragments) in enumerate(local.meetings(self.steps, ends)):
            for replica in alone:
                replica.train(step)
            all_end = step.number in ends or position + 1 == len(self.steps)
            if late is not None and (all_end or position == late.position + local.delay):
                _move(local.of_fragment(late.fragment, theta), velocity, late.total, local, replicas)
                late.go_on(alone, theta)
                late = None
            for fragment in fragments:
                own = local.of_fragment(fragment, theta)
                total = add([replica.changes_since(own) for replica in alone])
                statistics = None if fragment else _join_statistics(alone)
                if local.delay and not all_end:
                    late = _Late.of(alone, position, fragment, total, statistics)
                    continue
                _move(own, velocity, total, local, replicas)
                for replica in alone:
                    replica.go_on_from(own, statistics)
                if statistics is not None:
                    _check_buffers(alone)
        return alone[0].model, alone[0].loss


def _move(theta: Tensors, velocity: Tensors, total: Tensors, local: LocalSteps, replicas: int) -> None:
    """Take the outer step of `theta`, in place, by the sums `total` of what the replicas have changed."""
    for name, values in theta.items():
        delta = total[name] / replicas
        if local.outer_momentum:
            velocity[name].mul_(local.outer_momentum).add_(delta)
            delta = delta + local.outer_momentum * velocity[name]
        values.sub_(local.outer_lr * delta)


@dataclass(frozen=True)
class _Forward:
    """The statistics of norms that began with 0 before micro-batch `number`, and the calls of each norm."""

    step: int
    number: int
    added: Mapping[str, tuple[Tensor, ...]]


class _Replica:
    """A copy of the model and of the loss, with an optimiser and a schedule of its own."""

    def __init__(self, job: Rounds, rank: int, replicas: int) -> None:
        self.model, self._job = detached_copy(job.model), job
        loss = job.recipe.loss
        self.loss = detached_copy(loss) if isinstance(loss, nn.Module) else copy.deepcopy(loss)
        self._recipe = replace(job.recipe, loss=self.loss)
        self._hooks = hooks_of(job.model.named_parameters())
        own = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters: dict[str, nn.Parameter] = {**own, **trained_by(self.loss)}
        self.optimizer = call_factory(job.recipe.optimizer, list(self.parameters.items()))
        self._schedule = None if job.recipe.scheduler is None else LrSchedule(job.recipe, self.optimizer)
        self._rank, self._replicas = rank, replicas
        with training_mode(self.model, caches=True):
            self.norms = {name: module for name, module in self.model.named_modules() if _keeps_statistics(module)}
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
        self._job.after_backward(self.model, self.loss)
        recipe, seed = self._recipe, self._job.seed
        for name, hooks in self._hooks.items():
            gradient = self.parameters[name].grad
            if gradient is not None:
                self.parameters[name].grad = hooked(hooks, gradient, seed=hook_seed(seed, step.number, name))
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if recipe.clip_grad_norm is not None:
            _clip_norm(gradients, recipe.clip_grad_norm)
        if recipe.clip_grad_value is not None and gradients:
            nn.utils.clip_grad_value_(self.parameters.values(), recipe.clip_grad_value)
        reseed(layer_seed(seed, step.number, 0, "optimizer"))
        self.optimizer.step()
        if self._schedule is not None:
            self._schedule.after_step(step)

    def _add_gradients(self, step: Step, number: int, indices: Sequence[int], share: float) -> None:
        job, recipe = self._job, self._recipe
        batch = SeededDataset(job.dataset, job.seed, step.epoch).batch(indices, job.collate)
        for norm in self.norms.values():
            for values in _running(norm):
                values.zero_()
        drawing = seeded(self.model, job.graph, job.seed, step.number, number)
        with autocast_to(recipe.precision):
            with drawing:
                output = self.model(*batch.args, **batch.kwargs)
            seed_loss(job.seed, step.number, number)
            loss = recipe.cast_loss(output, batch.target) * share
        if loss.requires_grad:
            with drawing:
                torch.autograd.backward(loss)
        added = {name: tuple(value.clone() for value in _running(norm)) for name, norm in self.norms.items()}
        self.forwards.append(_Forward(step.number, number, added))

    @torch.no_grad()
    def changes_since(self, theta: Tensors) -> Tensors:
        """Return theta minus the parameters; no element is -0.0, which stands for nothing where sums are made."""
        return {name: values - self.parameters[name] + 0.0 for name, values in theta.items()}

    @torch.no_grad()
    def go_on_from(
        self, theta: Mapping[str, Tensor], statistics: Mapping[str, tuple[Tensor, ...]] | None = None
    ) -> None:
        """Take the parameters, and the statistics if they are given, on which all have met."""
        for name, values in theta.items():
            self.parameters[name].copy_(values)
        if statistics is None:
            return
        for name, met in statistics.items():
            for own, joined in zip(_running(self.norms[name]), met, strict=True):
                own.copy_(joined)
        self.statistics = {name: tuple(value.clone() for value in values) for name, values in statistics.items()}


@dataclass(frozen=True)
class _Late:
    """A meeting whose outer step is yet to come: of whom, measured at which position of the steps, and with what."""

    position: int
    fragment: int
    total: Tensors
    statistics: Mapping[str, tuple[Tensor, ...]] | None
    measured: Sequence[Tensors]

    @classmethod
    def of(
        cls,
        alone: Sequence[_Replica],
        position: int,
        fragment: int,
        total: Tensors,
        statistics: Mapping[str, tuple[Tensor, ...]] | None,
    ) -> "_Late":
        """Keep what the replicas `alone` are now."""
        measured = [{name: replica.parameters[name].detach().clone() for name in total} for replica in alone]
        return cls(position, fragment, total, statistics, measured)

    @torch.no_grad()
    def go_on(self, alone: Sequence[_Replica], theta: Mapping[str, Tensor]) -> None:
        """Let each replica go on from `theta` with what it has trained since."""
        for replica, measured in zip(alone, self.measured, strict=True):
            for name, values in measured.items():
                replica.parameters[name].add_(theta[name] - values)
            replica.go_on_from({}, self.statistics)
        if self.statistics is not None:
            _check_buffers(alone)


def _clip_norm(gradients: Sequence[Tensor], largest: float) -> None:
    """As torch.nn.utils.clip_grad_norm_, but with a norm in double precision, as functions compute it."""
    squares = [float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2 for gradient in gradients]
    factor = largest / (math.sqrt(math.fsum(squares)) + 1e-6)
    for gradient in gradients if factor < 1 else ():
        gradient.mul_(factor)


def _keeps_statistics(module: nn.Module) -> bool:
    """Return True for a norm that keeps running statistics in training."""
    return isinstance(module, _NormBase) and module.training and module.running_mean is not None


def _running(norm: nn.Module) -> tuple[Tensor, ...]:
    """The running mean, the running variance, and the count of calls: the buffers themselves."""
    return tuple(norm.get_buffer(name) for name in ("running_mean", "running_var", "num_batches_tracked"))


def _join_statistics(alone: Sequence[_Replica]) -> dict[str, tuple[Tensor, ...]]:
    """Return the statistics of a process that has run the forwards of all replicas, in order; they begin anew."""
    forwards = sorted((f for replica in alone for f in replica.forwards), key=lambda f: (f.step, f.number))
    for replica in alone:
        replica.forwards = []
    joined: dict[str, tuple[Tensor, ...]] = {}
    for name, norm in alone[0].norms.items():
        mean, variance, count = (value.clone() for value in alone[0].statistics[name])
        for forward in forwards:
            *own, calls = forward.added[name]
            for value, added in zip((mean, variance), own, strict=True):
                if norm.momentum is not None:
                    value.mul_((1 - norm.momentum) ** int(calls)).add_(added)
                elif calls:  # a plain average over all calls
                    value.mul_(count).add_(added * calls).div_(count + calls)
            count += calls
        joined[name] = (mean, variance, count)
    return joined


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
