"""Training as plain PyTorch does it, in one process: what a run over functions must equal, up to rounding.

On whole batches it is what a user's script does, with the user's own model, which is afterwards as it was. Else it
accumulates the gradients of the same micro-batches as a run, and draws the same random numbers.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from funcpipe.comm.block_int8 import largest_in_blocks
from funcpipe.core import Interval, OnNan
from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.autocast import autocast_to
from funcpipe.model.graph.isolation import preserve_gradients, preserve_state
from funcpipe.model.graph.modes import training_mode
from funcpipe.model.graph.snapshot import Snapshot, reachable
from funcpipe.model.seeds import layer_seed, reseed
from funcpipe.model.split.held_loss import trained_by
from funcpipe.model.tensors import named_tensors
from funcpipe.training.data import Collate, MapDataset, Step
from funcpipe.training.lr_schedule import LrSchedule
from funcpipe.training.optimizers import call_factory
from funcpipe.training.parameter_hooks import NamedHooks, hook_seed, hooked, hooks_of
from funcpipe.training.recipe import Recipe
from funcpipe.training.rng import SeededDataset, seed_loss, seeded
from funcpipe.training.teachers import TeacherUpdate

Told = Callable[[nn.Module], None]


def train_in_one_process(
    model: nn.Module,
    graph: LayerGraph,
    dataset: MapDataset,
    steps: Sequence[Step],
    *,
    recipe: Recipe,
    seed: int,
    reverse: bool = False,
    collate: Collate | None = None,
    after_backward: Told = lambda model: None,
    after_step: Callable[[nn.Module, Step], None] = lambda model, step: None,
) -> nn.Module:
    """A copy of `model` trained by plain PyTorch on the same micro-batches, drawing the same random numbers.

    With `reverse`, gradients are added up from the last micro-batch to the first, which shows the effect of rounding.
    `after_backward` is called in each step when all gradients are there, `after_step` when it is done. Steps whose
    gradients are not finite are left out if the recipe says so; nothing ends the training. The loss is left as it was.
    """
    trained = detached_copy(model)
    hooks = hooks_of(model.named_parameters())
    with training_mode(trained), _kept(recipe.loss):
        _accumulate(
            trained,
            graph,
            dataset,
            steps,
            recipe=recipe,
            seed=seed,
            hooks=hooks,
            reverse=reverse,
            collate=collate,
            after_backward=after_backward,
            after_step=after_step,
        )
    return trained


def _accumulate(
    model: nn.Module,
    graph: LayerGraph,
    dataset: MapDataset,
    steps: Sequence[Step],
    *,
    recipe: Recipe,
    seed: int,
    hooks: NamedHooks,
    reverse: bool = False,
    collate: Collate | None = None,
    after_backward: Told = lambda model: None,
    after_step: Callable[[nn.Module, Step], None] = lambda model, step: None,
) -> None:
    """Train `model` micro-batch by micro-batch. The `hooks` of its parameters see the sums, and autograd has none."""
    own = _trained_by(model, recipe)
    chosen = call_factory(recipe.optimizer, list(own.items()))
    schedule = None if recipe.scheduler is None else LrSchedule(recipe, chosen)
    scaler = torch.amp.GradScaler("cpu", enabled=recipe.precision.scales_loss)
    skips = recipe.on_nan is OnNan.SKIP
    teachers = TeacherUpdate(recipe.teachers, model)
    for step in steps:
        chosen.zero_grad()
        before = (Snapshot(model), Snapshot(recipe.loss)) if skips else ()
        weight = _add_gradients(
            model, graph, dataset, step, recipe=recipe, seed=seed, scaler=scaler, reverse=reverse, collate=collate
        )
        scaler.unscale_(chosen)
        if recipe.is_weighted:
            _multiply(own, step.samples / weight if weight else math.nan)
        _run_hooks(hooks, own, seed, step.number)
        after_backward(model)
        left_out = skips and not _have_finite_gradients(own)
        _clip(own, recipe)
        if scaler.is_enabled() or not left_out:
            reseed(layer_seed(seed, step.number, 0, "optimizer"))
            scaler.step(chosen)
        scaler.update()
        if left_out:
            for snapshot in before:
                snapshot.restore()
        else:
            teachers.after_step(step.number)
        if schedule is not None:
            schedule.after_step(step)
        after_step(model, step)


def _add_gradients(
    model: nn.Module,
    graph: LayerGraph,
    dataset: MapDataset,
    step: Step,
    *,
    recipe: Recipe,
    seed: int,
    scaler: torch.amp.GradScaler,
    reverse: bool,
    collate: Collate | None,
) -> float:
    """Add up the scaled gradients of the micro-batches of a step; returns the weight of all losses that have one."""
    order, weight = list(enumerate(step.micro_batches)), 0.0
    for number, indices in reversed(order) if reverse else order:
        batch = SeededDataset(dataset, seed, step.epoch).batch(indices, collate)
        drawing = seeded(model, graph, seed, step.number, number)
        with autocast_to(recipe.precision):
            with drawing:
                output = model(*batch.args, **batch.kwargs)
            seed_loss(seed, step.number, number)
            found = recipe.cast_loss(output, batch.target)
        total, own_weight = found if recipe.is_weighted else (found * (len(indices) / step.samples), 0.0)
        share, weight = total / step.samples if recipe.is_weighted else total, weight + own_weight
        if recipe.on_nan is OnNan.SKIP and not math.isfinite(share.item()):
            share = share * math.nan
        if share.requires_grad:
            with drawing:
                torch.autograd.backward(scaler.scale(share))
    return weight


def _run_hooks(hooks: NamedHooks, own: Mapping[str, nn.Parameter], seed: int, step: int) -> None:
    for name, named in hooks.items():
        gradient = own[name].grad
        if gradient is not None:
            own[name].grad = hooked(named, gradient, seed=hook_seed(seed, step, name))


def _train_on_whole_batches(
    model: nn.Module,
    dataset: MapDataset,
    steps: Sequence[Step],
    *,
    recipe: Recipe,
    seed: int,
    collate: Collate | None,
    after_backward: Told,
) -> None:
    """Train `model` as a user's script does it: one forward and backward of each global batch.

    Samples that draw random numbers draw those of a run; the model and the loss draw others.
    """
    own = _trained_by(model, recipe)
    optimizer = call_factory(recipe.optimizer, list(own.items()))
    scheduler = None if recipe.scheduler is None else recipe.scheduler(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=recipe.precision.scales_loss)
    teachers = TeacherUpdate(recipe.teachers, model)
    for step in steps:
        optimizer.zero_grad()
        indices = [index for micro_batch in step.micro_batches for index in micro_batch]
        batch = SeededDataset(dataset, seed, step.epoch).batch(indices, collate)
        with autocast_to(recipe.precision):
            loss = recipe.loss(model(*batch.args, **batch.kwargs), batch.target)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        torch.autograd.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        after_backward(model)
        is_taken = recipe.on_nan is not OnNan.SKIP or _have_finite_gradients(own)
        _clip(own, recipe)
        if scaler.is_enabled() or is_taken:
            scaler.step(optimizer)
        scaler.update()
        if is_taken:
            teachers.after_step(step.number)
        if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
            continue
        if step.ends_epoch or recipe.scheduler_interval is Interval.STEP:
            scheduler.step()


def _trained_by(model: nn.Module, recipe: Recipe) -> dict[str, nn.Parameter]:
    """The trainable parameters of the model and the loss by name, as an optimiser gets them."""
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {**own, **trained_by(recipe.loss)}


def _multiply(own: Mapping[str, nn.Parameter], factor: float) -> None:
    for parameter in own.values():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def _clip(own: Mapping[str, nn.Parameter], recipe: Recipe) -> None:
    if recipe.clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(own.values(), recipe.clip_grad_norm)
    if recipe.clip_grad_value is not None:
        nn.utils.clip_grad_value_(own.values(), recipe.clip_grad_value)


def _have_finite_gradients(own: Mapping[str, nn.Parameter]) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in own.values() if p.grad is not None)


def detached_copy(model: nn.Module) -> nn.Module:
    """A deep copy of `model` without the hooks of its parameters; tensors that a forward pass has computed and left in
    an attribute are detached in it.

    `copy.deepcopy` alone refuses these.
    """
    seen: dict[int, Any] = {}
    values = [value for value in reachable(model.modules(), seen) if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in values if not value.is_leaf})


@contextlib.contextmanager
def _kept(root: Any) -> Iterator[None]:
    """At the end, a model or a loss is as it was: its parameters, their gradients and all else that it holds."""
    parameters = root.parameters() if isinstance(root, nn.Module) else trained_by(root).values()
    kept = [(parameter, parameter.grad, parameter.detach().clone()) for parameter in parameters]
    for parameter, _, _ in kept:
        parameter.grad = None
    with preserve_state(root):
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, gradient, values in kept:
                    parameter.copy_(values)
                    parameter.grad = gradient


@dataclass(frozen=True, kw_only=True)
class PlainRun:
    """Tensors of a model before and after training, by name, and the gradients of each step if they were kept."""

    start: Mapping[str, Tensor]
    end: Mapping[str, Tensor]
    gradients: tuple[Mapping[str, Tensor], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlainTraining:
    """All that training in one process takes, to do it several times. Weights are moved by `rounding`, a share of each
    weight, or by the last digit of their dtype if that is more; with `in_blocks`, a share of the largest of 256.
    Gradients of micro-batches are accumulated, or, for `whole` batches, computed at once.
    """

    model: nn.Module
    graph: LayerGraph
    dataset: MapDataset
    steps: Sequence[Step]
    recipe: Recipe
    seed: int
    rounding: float = 0.0
    in_blocks: bool = False
    collate: Collate | None = None
    whole: bool = False

    @property
    def can_be_whole(self) -> bool:
        """Whether training on whole batches draws the same random numbers: none."""
        return not any("draws" in node.meta for node in self.graph.module.graph.nodes)

    def run(self, number: int = 0, names: Collection[str] | None = None) -> PlainRun:
        """Train once; in runs other than number 0, from weights that are off by rounding, differently for each.

        Given `names`, keeps only those tensors, but their gradients too.
        """
        gradients: list[Mapping[str, Tensor]] = []

        def keep(model: nn.Module) -> None:
            parameters = [*model.named_parameters(remove_duplicate=False), *trained_by(self.recipe.loss).items()]
            wanted = {name: p.grad for name, p in parameters if name in (names or ())}
            gradients.append({name: gradient.clone() for name, gradient in wanted.items() if gradient is not None})

        with _kept(self.model), _kept(self.recipe.loss), training_mode(self.model):
            if number:
                generator = torch.Generator().manual_seed(number)
                _move_by_rounding(_trained_by(self.model, self.recipe), self.rounding, self.in_blocks, generator)
            start = self._tensors(names)
            self._train(keep)
            return PlainRun(start=start, end=self._tensors(names), gradients=tuple(gradients))

    def _train(self, after_backward: Told) -> None:
        given: dict[str, Any] = {"recipe": self.recipe, "seed": self.seed, "collate": self.collate}
        given["after_backward"] = after_backward
        if self.whole:
            _train_on_whole_batches(self.model, self.dataset, self.steps, **given)
            return
        hooks = hooks_of(self.model.named_parameters())
        with preserve_gradients(self.model):  # autograd runs no hooks meanwhile
            _accumulate(self.model, self.graph, self.dataset, self.steps, hooks=hooks, **given)

    def _tensors(self, names: Collection[str] | None) -> dict[str, Tensor]:
        tensors = {**named_tensors(self.model), **trained_by(self.recipe.loss)}
        return {name: t.detach().clone() for name, t in tensors.items() if names is None or name in names}


def _move_by_rounding(
    own: Mapping[str, nn.Parameter], rounding: float, in_blocks: bool, generator: torch.Generator
) -> None:
    with torch.no_grad():
        for parameter in own.values():
            share = max(rounding, torch.finfo(parameter.dtype).eps) if parameter.is_floating_point() else 0.0
            if parameter.is_complex():
                share = max(rounding, torch.finfo(parameter.real.dtype).eps)
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            if in_blocks and parameter.dtype is torch.float32:
                parameter.add_(share * signs * largest_in_blocks(parameter))
            else:
                parameter.mul_(1 + share * signs.to(parameter.dtype))
