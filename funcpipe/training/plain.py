"""Training as plain PyTorch does it, in one process: what a run over functions must equal, up to rounding."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.snapshot import reachable
from funcpipe.model.tensors import named_tensors
from funcpipe.training.data import MapDataset, Step, load_batch
from funcpipe.training.passes import LossFunction
from funcpipe.training.rng import SeededDataset, seed_loss, seeded
from funcpipe.training.stage_optimizer import OptimizerFactory


def train_in_one_process(
    model: nn.Module,
    graph: LayerGraph,
    dataset: MapDataset,
    steps: Sequence[Step],
    *,
    loss: LossFunction,
    optimizer: OptimizerFactory,
    seed: int,
    clip_grad_norm: float | None = None,
    reverse: bool = False,
    after_backward: Callable[[nn.Module], None] = lambda model: None,
) -> nn.Module:
    """A copy of `model` trained by plain PyTorch on the same micro-batches, drawing the same random numbers.

    With `reverse`, gradients are added up from the last micro-batch to the first, which shows the effect of rounding.
    `after_backward` is called in each step when all gradients are there.
    """
    trained = detached_copy(model).train()
    chosen = optimizer(trained.parameters())
    for step in steps:
        chosen.zero_grad()
        order = list(enumerate(step.micro_batches))
        for number, indices in reversed(order) if reverse else order:
            batch = load_batch(SeededDataset(dataset, seed, step.epoch), indices)
            drawing = seeded(trained, graph, seed, step.number, number)
            with drawing:
                output = trained(*batch.args, **batch.kwargs)
            seed_loss(seed, step.number, number)
            share = loss(output, batch.target) * (len(indices) / step.samples)
            with drawing:
                torch.autograd.backward(share)
        after_backward(trained)
        if clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(trained.parameters(), clip_grad_norm)
        chosen.step()
    return trained


def detached_copy(model: nn.Module) -> nn.Module:
    """A deep copy of `model`; tensors that a forward pass has computed and left in an attribute are detached in it.

    `copy.deepcopy` alone refuses these.
    """
    seen: dict[int, Any] = {}
    values = [value for value in reachable(model.modules(), seen) if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in values if not value.is_leaf})


@dataclass(frozen=True, kw_only=True)
class PlainRun:
    """Tensors of a model before and after training, by name, and the gradients of each step if they were kept."""

    start: Mapping[str, Tensor]
    end: Mapping[str, Tensor]
    gradients: tuple[Mapping[str, Tensor], ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlainTraining:
    """All that training in one process takes, to do it several times. Weights are moved by `rounding`, a share of each
    weight, or by the last digit of their dtype if that is more.
    """

    model: nn.Module
    graph: LayerGraph
    dataset: MapDataset
    steps: Sequence[Step]
    loss: LossFunction
    optimizer: OptimizerFactory
    seed: int
    clip_grad_norm: float | None = None
    rounding: float = 0.0

    def run(self, number: int = 0, names: Collection[str] | None = None) -> PlainRun:
        """Train once; in runs other than number 0, from weights that are off by rounding, differently for each.

        Given `names`, keeps only those tensors, but their gradients too.
        """
        start = detached_copy(self.model)
        if number:
            _move_by_rounding(start, self.rounding, torch.Generator().manual_seed(number))
        gradients: list[Mapping[str, Tensor]] = []

        def keep(model: nn.Module) -> None:
            parameters = model.named_parameters(remove_duplicate=False)
            wanted = {name: p.grad for name, p in parameters if name in (names or ())}
            gradients.append({name: gradient.clone() for name, gradient in wanted.items() if gradient is not None})

        end = train_in_one_process(
            start,
            self.graph,
            self.dataset,
            self.steps,
            loss=self.loss,
            optimizer=self.optimizer,
            seed=self.seed,
            clip_grad_norm=self.clip_grad_norm,
            after_backward=keep,
        )
        return PlainRun(start=_tensors(start, names), end=_tensors(end, names), gradients=tuple(gradients))


def _move_by_rounding(model: nn.Module, rounding: float, generator: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            share = max(rounding, torch.finfo(parameter.dtype).eps) if parameter.is_floating_point() else 0.0
            if parameter.is_complex():
                share = max(rounding, torch.finfo(parameter.real.dtype).eps)
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + share * signs.to(parameter.dtype))


def _tensors(model: nn.Module, names: Collection[str] | None) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in named_tensors(model).items() if names is None or name in names}
