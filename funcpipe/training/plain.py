"""Training as plain PyTorch does it, in one process: what a run over functions must equal, up to rounding.

`train_on_whole_batches` is what a user's script does: each global batch at once. `train_in_one_process` accumulates the
gradients of the same micro-batches as a run, and draws the same random numbers.
"""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from funcpipe.comm.block_int8 import largest_in_blocks
from funcpipe.core import Interval, OnNan
from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.autocast import autocast_to
from funcpipe.model.graph.modes import training_mode
from funcpipe.model.graph.snapshot import Snapshot, reachable
from funcpipe.model.tensors import named_tensors
from funcpipe.training.data import Collate, MapDataset, Step
from funcpipe.training.lr_schedule import LrSchedule
from funcpipe.training.optimizers import plain_optimizer
from funcpipe.training.recipe import Recipe
from funcpipe.training.rng import SeededDataset, seed_loss, seeded
from funcpipe.training.teachers import TeacherUpdate


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
    after_backward: Callable[[nn.Module], None] = lambda model: None,
    after_step: Callable[[nn.Module, Step], None] = lambda model, step: None,
) -> nn.Module:
    """A copy of `model` trained by plain PyTorch on the same micro-batches, drawing the same random numbers.

    With `reverse`, gradients are added up from the last micro-batch to the first, which shows the effect of rounding.
    `after_backward` is called in each step when all gradients are there, `after_step` when it is done. Steps whose
    gradients are not finite are left out if the recipe says so; nothing ends the training.
    """
    trained = detached_copy(model)
    with training_mode(trained):
        chosen = plain_optimizer(recipe.optimizer, trained)
        schedule = None if recipe.scheduler is None else LrSchedule(recipe, chosen)
        scaler = torch.amp.GradScaler("cpu", enabled=recipe.precision.scales_loss)
        skips = recipe.on_nan is OnNan.SKIP
        teachers = TeacherUpdate(recipe.teachers, trained)
        for step in steps:
            chosen.zero_grad()
            before = Snapshot(trained) if skips else None
            order = list(enumerate(step.micro_batches))
            for number, indices in reversed(order) if reverse else order:
                batch = SeededDataset(dataset, seed, step.epoch).batch(indices, collate)
                drawing = seeded(trained, graph, seed, step.number, number)
                with autocast_to(recipe.precision):
                    with drawing:
                        output = trained(*batch.args, **batch.kwargs)
                    seed_loss(seed, step.number, number)
                    share = recipe.loss(output, batch.target) * (len(indices) / step.samples)
                if skips and not math.isfinite(share.item()):
                    share = share * math.nan
                with drawing:
                    torch.autograd.backward(scaler.scale(share))
            scaler.unscale_(chosen)
            after_backward(trained)
            left_out = before is not None and not _has_finite_gradients(trained)
            if recipe.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(trained.parameters(), recipe.clip_grad_norm)
            if scaler.is_enabled() or not left_out:
                scaler.step(chosen)
            scaler.update()
            if before is not None and left_out:
                before.restore()
            else:
                teachers.after_step(step.number)
            if schedule is not None:
                schedule.after_step(step)
            after_step(trained, step)
    return trained


def train_on_whole_batches(
    model: nn.Module,
    dataset: MapDataset,
    steps: Sequence[Step],
    *,
    recipe: Recipe,
    seed: int,
    collate: Collate | None = None,
    after_backward: Callable[[nn.Module], None] = lambda model: None,
) -> nn.Module:
    """A copy of `model` trained as a user's script does it: one forward and backward of each global batch.

    Samples that draw random numbers draw those of a run; the model and the loss draw others.
    """
    trained = detached_copy(model)
    with training_mode(trained):
        optimizer = plain_optimizer(recipe.optimizer, trained)
        scheduler = None if recipe.scheduler is None else recipe.scheduler(optimizer)
        scaler = torch.amp.GradScaler("cpu", enabled=recipe.precision.scales_loss)
        teachers = TeacherUpdate(recipe.teachers, trained)
        for step in steps:
            optimizer.zero_grad()
            indices = [index for micro_batch in step.micro_batches for index in micro_batch]
            batch = SeededDataset(dataset, seed, step.epoch).batch(indices, collate)
            with autocast_to(recipe.precision):
                loss = recipe.loss(trained(*batch.args, **batch.kwargs), batch.target)
            torch.autograd.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            after_backward(trained)
            if recipe.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(trained.parameters(), recipe.clip_grad_norm)
            if scaler.is_enabled() or recipe.on_nan is not OnNan.SKIP or _has_finite_gradients(trained):
                scaler.step(optimizer)
            scaler.update()
            if recipe.on_nan is not OnNan.SKIP or _has_finite_gradients(trained):
                teachers.after_step(step.number)
            if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
                continue
            if step.ends_epoch or recipe.scheduler_interval is Interval.STEP:
                scheduler.step()
    return trained


def _has_finite_gradients(model: nn.Module) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def detached_copy(model: nn.Module) -> nn.Module:
    """A deep copy of `model` with the hooks of its parameters; tensors that a forward pass has computed and left in an
    attribute are detached in it.

    `copy.deepcopy` alone refuses these, and drops those.
    """
    seen: dict[int, Any] = {}
    values = [value for value in reachable(model.modules(), seen) if isinstance(value, Tensor)]
    copied = copy.deepcopy(model, {id(value): value.detach().clone() for value in values if not value.is_leaf})
    for parameter, other in zip(model.parameters(), copied.parameters(), strict=True):
        for hook in (parameter._backward_hooks or {}).values():
            other.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            other.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return copied


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
        start = detached_copy(self.model)
        if number:
            _move_by_rounding(start, self.rounding, self.in_blocks, torch.Generator().manual_seed(number))
        gradients: list[Mapping[str, Tensor]] = []

        def keep(model: nn.Module) -> None:
            parameters = model.named_parameters(remove_duplicate=False)
            wanted = {name: p.grad for name, p in parameters if name in (names or ())}
            gradients.append({name: gradient.clone() for name, gradient in wanted.items() if gradient is not None})

        train = train_on_whole_batches if self.whole else partial(train_in_one_process, graph=self.graph)
        end = train(
            start,
            dataset=self.dataset,
            steps=self.steps,
            recipe=self.recipe,
            seed=self.seed,
            collate=self.collate,
            after_backward=keep,
        )
        return PlainRun(start=_tensors(start, names), end=_tensors(end, names), gradients=tuple(gradients))


def _move_by_rounding(model: nn.Module, rounding: float, in_blocks: bool, generator: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            share = max(rounding, torch.finfo(parameter.dtype).eps) if parameter.is_floating_point() else 0.0
            if parameter.is_complex():
                share = max(rounding, torch.finfo(parameter.real.dtype).eps)
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            if in_blocks and parameter.dtype is torch.float32:
                parameter.add_(share * signs * largest_in_blocks(parameter))
            else:
                parameter.mul_(1 + share * signs.to(parameter.dtype))


def _tensors(model: nn.Module, names: Collection[str] | None) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in named_tensors(model).items() if names is None or name in names}
