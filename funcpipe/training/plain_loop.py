"""The loop of plain PyTorch that trains a model in place: on whole batches, or accumulating those of micro-batches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from funcpipe.core import Coupled, Interval, OnNan
from funcpipe.model.draws import layer_seed, reseed
from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.isolation import Snapshot
from funcpipe.model.graph.modes import without_caches
from funcpipe.model.graph.program import autocast_to
from funcpipe.model.split.stage import trained_by
from funcpipe.model.tensors import flatten
from funcpipe.training.batch_layout import BatchLayout, first_dims
from funcpipe.training.data import Collate, LoadedBatch, MapDataset, Step
from funcpipe.training.lr_schedule import LrSchedule
from funcpipe.training.optimizers import call_factory
from funcpipe.training.parameter_hooks import NamedHooks, hook_seed, hooked
from funcpipe.training.recipe import Recipe
from funcpipe.training.rng import SeededDataset, seed_loss, seeded
from funcpipe.training.teachers import TeacherUpdate


@dataclass(frozen=True, kw_only=True)
class PlainLoop:
    """Trains `model`, and the loss of `recipe`, for `steps`. Samples that draw random numbers draw those of a run.

    `layout` says how outputs lie side by side, for a loss that is computed from those of all micro-batches.
    `after_backward` is called in each step when all gradients are there, `after_step` when it is done.
    """

    model: nn.Module
    dataset: MapDataset
    steps: Sequence[Step]
    recipe: Recipe
    seed: int
    collate: Collate | None = None
    layout: BatchLayout | None = None
    after_backward: Callable[[nn.Module], None] = lambda model: None
    after_step: Callable[[nn.Module, Step], None] = lambda model, step: None

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters of the model and the loss by name, as an optimiser gets them."""
        own = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        return {**own, **trained_by(self.recipe.loss)}

    def on_whole_batches(self) -> None:
        """Do what a user's script does: one forward and backward of each global batch.

        The model and the loss draw other random numbers than in a run.
        """
        recipe, skips = self.recipe, self.recipe.on_nan is OnNan.SKIP
        optimizer = call_factory(recipe.optimizer, list(self.parameters.items()))
        scheduler = None if recipe.scheduler is None else recipe.scheduler(optimizer)
        scaler = torch.amp.GradScaler("cpu", enabled=recipe.precision.scales_loss)
        teachers = TeacherUpdate(recipe.teachers, self.model)
        for step in self.steps:
            optimizer.zero_grad()
            batch = self._load(step, [index for micro_batch in step.micro_batches for index in micro_batch])
            with autocast_to(recipe.precision):
                loss = recipe.loss(self.model(*batch.args, **batch.kwargs), batch.target)
            loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
            torch.autograd.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            self.after_backward(self.model)
            is_taken = not skips or self._has_finite_gradients()
            self._clip()
            if scaler.is_enabled() or is_taken:
                scaler.step(optimizer)
            scaler.update()
            if is_taken:
                teachers.after_step(step.number)
            is_due = step.ends_epoch or recipe.scheduler_interval is Interval.STEP
            if is_due and scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()
            self.after_step(self.model, step)

    def accumulate(self, graph: LayerGraph, hooks: NamedHooks, *, reverse: bool = False) -> None:
        """Add up the gradients of the micro-batches of each step, from the last one on in `reverse`.

        The model, from which `graph` was made, draws the same random numbers as in a run. The `hooks` of its parameters
        see the sums; autograd must have none.
        """
        recipe, skips = self.recipe, self.recipe.on_nan is OnNan.SKIP
        optimizer = call_factory(recipe.optimizer, list(self.parameters.items()))
        schedule = None if recipe.scheduler is None else LrSchedule(recipe, optimizer)
        scaler = torch.amp.GradScaler("cpu", enabled=recipe.precision.scales_loss)
        teachers = TeacherUpdate(recipe.teachers, self.model)
        for step in self.steps:
            optimizer.zero_grad()
            before = (Snapshot(self.model), Snapshot(recipe.loss)) if skips else ()
            add = self._add_joint_gradients if recipe.coupled is Coupled.CACHE else self._add_gradients
            weight = add(graph, step, scaler, reverse=reverse)
            scaler.unscale_(optimizer)
            if recipe.is_weighted:
                self._multiply(step.samples / weight if weight else math.nan)
            self._run_hooks(hooks, step)
            self.after_backward(self.model)
            is_taken = not skips or self._has_finite_gradients()
            self._clip()
            if scaler.is_enabled() or is_taken:
                reseed(layer_seed(self.seed, step.number, 0, "optimizer"))
                scaler.step(optimizer)
            scaler.update()
            if is_taken:
                teachers.after_step(step.number)
            else:
                for snapshot in before:
                    snapshot.restore()
            if schedule is not None:
                schedule.after_step(step)
            self.after_step(self.model, step)

    def _load(self, step: Step, indices: Sequence[int]) -> LoadedBatch:
        return SeededDataset(self.dataset, self.seed, step.epoch).batch(indices, self.collate)

    def _add_gradients(self, graph: LayerGraph, step: Step, scaler: torch.amp.GradScaler, *, reverse: bool) -> float:
        """Add up the scaled gradients of a step; returns the weight of all losses that have one."""
        recipe, weight = self.recipe, 0.0
        order = list(enumerate(step.micro_batches))
        for number, indices in reversed(order) if reverse else order:
            batch = self._load(step, indices)
            drawing = seeded(self.model, graph, self.seed, step.number, number)
            with autocast_to(recipe.precision):
                with drawing:
                    output = self.model(*batch.args, **batch.kwargs)
                seed_loss(self.seed, step.number, number)
                found = recipe.cast_loss(output, batch.target)
            if recipe.is_weighted:
                share, weight = found[0] / step.samples, weight + found[1]
            else:
                share = found * (len(indices) / step.samples)
            if recipe.on_nan is OnNan.SKIP and not math.isfinite(share.item()):
                share = share * math.nan
            if share.requires_grad:
                with drawing:
                    torch.autograd.backward(scaler.scale(share))
        return weight

    def _add_joint_gradients(
        self, graph: LayerGraph, step: Step, scaler: torch.amp.GradScaler, *, reverse: bool
    ) -> float:
        """Add up the scaled gradients of a loss that is computed once, from the outputs of all micro-batches."""
        recipe, forwards, values = self.recipe, [], []
        for number, indices in enumerate(step.micro_batches):
            batch = self._load(step, indices)
            drawing = seeded(self.model, graph, self.seed, step.number, number)
            with autocast_to(recipe.precision), drawing, without_caches(self.model):  # as outputs are laid side by side
                leaves, tree = flatten(self.model(*batch.args, **batch.kwargs))
            starts = [leaf.detach().requires_grad_() if _has_gradient(leaf) else leaf for leaf in leaves]
            forwards.append((drawing, leaves, starts))
            values.append((tree.unflatten(iter(starts)), batch.target))
        layout = self.layout or first_dims(*values[0])
        output, target = layout.join(values, [len(indices) for indices in step.micro_batches])
        seed_loss(self.seed, step.number, 0)
        loss = recipe.cast_loss(output, target)
        if recipe.on_nan is OnNan.SKIP and not math.isfinite(loss.item()):
            loss = loss * math.nan
        if loss.requires_grad:
            torch.autograd.backward(scaler.scale(loss))
        for drawing, leaves, starts in reversed(forwards) if reverse else forwards:
            pairs = zip(leaves, starts, strict=True)
            found = [(leaf, start.grad) for leaf, start in pairs if _has_gradient(start) and start.grad is not None]
            if found:
                with drawing:
                    torch.autograd.backward([leaf for leaf, _ in found], [gradient for _, gradient in found])
        return 0.0

    def _run_hooks(self, hooks: NamedHooks, step: Step) -> None:
        for name, named in hooks.items():
            gradient = self.parameters[name].grad
            if gradient is not None:
                seed = hook_seed(self.seed, step.number, name)
                self.parameters[name].grad = hooked(named, gradient, seed=seed)

    def _multiply(self, factor: float) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _clip(self) -> None:
        if self.recipe.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.recipe.clip_grad_norm)
        if self.recipe.clip_grad_value is not None:
            nn.utils.clip_grad_value_(self.parameters.values(), self.recipe.clip_grad_value)

    def _has_finite_gradients(self) -> bool:
        return all(bool(p.grad.isfinite().all()) for p in self.parameters.values() if p.grad is not None)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
