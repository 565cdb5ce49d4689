"""The loop of plain PyTorch that trains a model in place: on whole batches, or accumulating those of micro-batches.

In the latter it draws the random numbers of a run. The generators are seeded anew for each call of the model that draws
random numbers and for the loss, from (seed, step, micro-batch, name), so that dropout and noise do not depend on which
function computes what.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from funcpipe.core import Coupled, Interval, OnNan
from funcpipe.core.cached import cached_property
from funcpipe.model.draws import (
    DrawingOperators,
    layer_seed,
    module_draw,
    operator_draw,
    reseed,
)
from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.isolation import Snapshot
from funcpipe.model.graph.modes import without_caches
from funcpipe.model.graph.program import WHOLE, autocast_to
from funcpipe.model.graph.reachable import reachable
from funcpipe.model.split.stage import trained_by
from funcpipe.model.tensors import flatten
from funcpipe.training.averaging import TeacherUpdate
from funcpipe.training.batches import Step
from funcpipe.training.data import Collate, LoadedBatch, MapDataset
from funcpipe.training.loading import SeededDataset
from funcpipe.training.losses import seed_loss
from funcpipe.training.optimizers import call_factory
from funcpipe.training.output_cache import BatchLayout, first_dims
from funcpipe.training.parameter_hooks import NamedHooks, hook_seed, hooked
from funcpipe.training.recipe import LrSchedule, Recipe


def detached_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy of `model` without the hooks of its parameters; tensors that a forward pass has computed and
    left in an attribute are detached in it.

    `copy.deepcopy` alone refuses these.
    """
    seen: dict[int, Any] = {}
    values = [value for value in reachable(model.modules(), seen) if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in values if not value.is_leaf})


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
            has_loss = not recipe.is_weighted or weight != 0.0
            if recipe.is_weighted:
                self._multiply(step.samples / weight if has_loss else math.nan)
            self._run_hooks(hooks, step)
            self.after_backward(self.model)
            is_taken = not skips or (has_loss and self._has_finite_gradients())
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


def seeded(model: nn.Module, graph: LayerGraph, seed: int, step: int, micro_batch: int) -> "_SeededModel":
    """Within this context, one forward of the plain `model` draws the random numbers that the stages of `graph` draw.

    Enter it again for the backward if the model recomputes parts of its forward there (torch.utils.checkpoint).
    """
    return _SeededModel(model, graph, (seed, step, micro_batch))


class _SeededModel(DrawingOperators):
    """Seeds the draws of a plain model as its traced graph does.

    Operators are looked at only if some draw outside of modules that are one node: below a dispatch mode autograd adds
    gradients up differently, with other strides, and kernels of torch may then give other results.

    torch's generator holds the seed that it was last given, also when a checkpoint has put it back to where a region of
    the forward began. So that seed says which draws have been before, and a region that is computed again draws the
    same numbers.
    """

    def __init__(self, model: nn.Module, graph: LayerGraph, seed: tuple[int, int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._seed = seed
        nodes = list(graph.module.graph.nodes)
        drawing = [node for node in nodes if "draws" in node.meta]
        self._has_drawing_operators = any(node.op != "call_module" for node in drawing)
        self._paths = dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module")
        draws = [node.meta["draws"] for node in drawing if node.op == "call_module"]
        self._generators = {name: item.generators for item in draws for name in item.names}
        self._calls: Counter[str] = Counter()  # draws and calls of modules so far, by path; "" for draws outside those
        self._calls_at: dict[int, Counter[str]] = {}  # the same at the time when torch's generator had some seed
        self._handles: list[Any] = []
        self._inside = 0
        self._seeds_inside: set[int] = set()  # of modules that are one node, while they run

    def __enter__(self) -> "_SeededModel":
        if not self._calls_at:
            self._go_on("forward", self._calls)
        modules = {**dict(self._model.named_modules(remove_duplicate=False)), WHOLE: self._model}
        for path in self._paths:
            self._handles += [
                modules[path].register_forward_pre_hook(self._entry(path), prepend=True),
                modules[path].register_forward_hook(self._leave, always_call=True),
            ]
        if self._has_drawing_operators:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self._has_drawing_operators:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before(self) -> None:
        """Seed the draw of an operator outside of modules that are one node."""
        if not self._is_inside():
            calls = self._position()
            self._go_on(operator_draw(calls[""] + 1), calls)

    def drawn(self) -> None:
        """Count it."""
        if not self._is_inside():
            self._calls = self._calls_at[torch.initial_seed()] = self._position() + Counter([""])

    def _entry(self, path: str) -> Any:
        def before(module: nn.Module, args: Any) -> None:
            if not self._inside:
                calls = self._position() + Counter([path])
                name = module_draw(path, calls[path])
                self._go_on(name, calls, self._generators.get(name, frozenset()))
                self._seeds_inside.add(torch.initial_seed())
            self._inside += 1

        return before

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside -= 1
        if not self._inside:
            self._go_on(f"after {torch.initial_seed()}", self._position())

    def _is_inside(self) -> bool:
        """Return True if a module that is one node is running, or a checkpoint inside it computes part of it again."""
        return bool(self._inside) or torch.initial_seed() in self._seeds_inside

    def _position(self) -> Counter[str]:
        return self._calls_at.get(torch.initial_seed(), self._calls)

    def _go_on(self, name: str, calls: Counter[str], generators: Set[str] = frozenset()) -> None:
        seed = layer_seed(*self._seed, name)
        reseed(seed, {"torch", *generators})
        self._calls = self._calls_at[seed] = calls
