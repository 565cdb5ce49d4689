"""Training as plain PyTorch does it, in one process: what a run over functions must equal, up to rounding.

On whole batches it is what a user's script does, with the user's own model, which is afterwards as it was. Else it
accumulates the gradients of the same micro-batches as a run, and draws the same random numbers.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.comm.block_int8 import largest_in_blocks
from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.isolation import preserve_gradients, preserve_state
from funcpipe.model.graph.modes import training_mode
from funcpipe.model.split.stage import trained_by
from funcpipe.model.tensors import named_tensors
from funcpipe.training.batches import Step
from funcpipe.training.data import Collate, MapDataset
from funcpipe.training.losses import LossFunction
from funcpipe.training.output_cache import BatchLayout
from funcpipe.training.parameter_hooks import hooks_of
from funcpipe.training.plain_loop import PlainLoop, detached_copy
from funcpipe.training.plain_rounds import LocalSteps, Rounds
from funcpipe.training.recipe import Recipe


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
    """Return a copy of `model` trained by plain PyTorch on the same micro-batches, drawing the same random numbers.

    With `reverse`, gradients are added up from the last micro-batch to the first, which shows the effect of rounding.
    `after_backward` is called in each step when all gradients are there, `after_step` when it is done. Steps whose
    gradients are not finite are left out if the recipe says so; nothing ends the training. The loss is left as it was.
    """
    trained = detached_copy(model)
    loop = PlainLoop(
        model=trained,
        dataset=dataset,
        steps=steps,
        recipe=recipe,
        seed=seed,
        collate=collate,
        after_backward=after_backward,
        after_step=after_step,
    )
    with training_mode(trained, caches=True), _kept(recipe.loss):
        loop.accumulate(graph, hooks_of(model.named_parameters()), reverse=reverse)
    return trained


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
    Gradients of micro-batches are accumulated, or, for `whole` batches, computed at once. `layout` is that of a loss of
    all micro-batches. With `local`, `replicas` train alone and meet, played one after the other.
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
    layout: BatchLayout | None = None
    whole: bool = False
    replicas: int = 1
    local: LocalSteps | None = None

    @property
    def can_be_whole(self) -> bool:
        """True if training on whole batches draws the same random numbers: none."""
        return self.local is None and not any("draws" in node.meta for node in self.graph.module.graph.nodes)

    def run(self, number: int = 0, names: Collection[str] | None = None) -> PlainRun:
        """Train once; in runs other than number 0, from weights that are off by rounding, differently for each.

        Given `names`, keeps only those tensors, but their gradients too.
        """
        gradients: list[Mapping[str, Tensor]] = []

        def keep(model: nn.Module, loss: LossFunction = self.recipe.loss) -> None:
            parameters = [*model.named_parameters(remove_duplicate=False), *trained_by(loss).items()]
            wanted = {name: p.grad for name, p in parameters if name in (names or ())}
            gradients.append({name: gradient.clone() for name, gradient in wanted.items() if gradient is not None})

        loop = PlainLoop(
            model=self.model,
            dataset=self.dataset,
            steps=self.steps,
            recipe=self.recipe,
            seed=self.seed,
            collate=self.collate,
            layout=self.layout,
            after_backward=keep,
        )
        with _kept(self.model), _kept(self.recipe.loss), training_mode(self.model, caches=True):
            if number:
                generator = torch.Generator().manual_seed(number)
                _move_by_rounding(loop.parameters, self.rounding, self.in_blocks, generator)
            start, model, loss = self._tensors(names), self.model, self.recipe.loss
            if self.local is not None:
                model, loss = self._rounds(keep).train(self.replicas, self.local)
            elif self.whole:
                loop.on_whole_batches()
            else:
                hooks = hooks_of(self.model.named_parameters())
                with preserve_gradients(self.model):  # autograd runs no hooks meanwhile
                    loop.accumulate(self.graph, hooks)
            return PlainRun(start=start, end=self._tensors(names, model, loss), gradients=tuple(gradients))

    def _rounds(self, keep: Callable[[nn.Module, LossFunction], None]) -> Rounds:
        """The training of replicas, which call `keep` in each step when all gradients are there."""
        return Rounds(
            model=self.model,
            graph=self.graph,
            dataset=self.dataset,
            steps=self.steps,
            recipe=self.recipe,
            seed=self.seed,
            collate=self.collate,
            after_backward=keep,
        )

    def _tensors(
        self, names: Collection[str] | None, model: nn.Module | None = None, loss: LossFunction | None = None
    ) -> dict[str, Tensor]:
        tensors = {**named_tensors(model or self.model), **trained_by(loss or self.recipe.loss)}
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
