"""A run without functions or storage: all replicas of all stages in this process, one after another, open to mistakes.

Each part of a step is a method, so that a subclass can do one of them wrongly and show that the mistake is found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from funcpipe.core.profile import TiedParameter
from funcpipe.core.routes import Routes, find_routes, stages_of_layers
from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.values import NOTHING_CARRIED
from funcpipe.model.split import StageModule, dump_stage, load_stage, split
from funcpipe.model.split.stage import attach_loss, below_loss
from funcpipe.training.batches import Step
from funcpipe.training.computation import Computation
from funcpipe.training.loading import SeededDataset
from funcpipe.training.optimizers import trainable_shapes
from funcpipe.training.parameter_hooks import hooks_of
from funcpipe.training.passes import Batch
from funcpipe.training.plain import PlainTraining
from funcpipe.training.recipe import Recipe
from funcpipe.training.stage_optimizer import trainable_parameters
from funcpipe.training.state import merge_stages


class InTurn:
    """Trains what `plain` trains, cut into stages of the layers `bounds` with so many replicas each."""

    def __init__(self, plain: PlainTraining, bounds: Sequence[tuple[int, int]], replicas: int) -> None:
        self.plain = plain
        self.replicas = replicas
        self.stages = split(plain.graph, bounds)
        attach_loss(self.stages[-1], plain.recipe.loss, NOTHING_CARRIED)
        ties = [TiedParameter(name=t.names[0], layers=t.layers, parameter_bytes=t.bytes) for t in plain.graph.ties]
        self.routes: Routes = find_routes(stages_of_layers(bounds), [], ties)
        copies = [[_copied(stage, plain.recipe) for _ in range(replicas)] for stage in self.stages]
        self.modules = [[stage for stage, _ in row] for row in copies]
        self.recipes = [[recipe for _, recipe in row] for row in copies]
        self.workers = [[self.worker(s, r) for r in range(replicas)] for s in range(len(bounds))]
        self.producer = {name: s for s, stage in enumerate(self.stages) for name in stage.sends}

    def train(self) -> dict[str, Tensor]:
        """The trained tensors by all their names."""
        for step in self.plain.steps:
            for row in self.workers:
                for worker in row:
                    worker.begin_step(step, lambda m, step=step: self.load(step, step.micro_batches[m]))  # type: ignore[misc]
            for m in range(len(step.micro_batches)):
                self.forward(step, m)
                self.backward(step, m)
            self.synchronise(step)
            self.exchange_norms()
            for s, row in enumerate(self.workers):
                for r in range(len(row)):
                    self.update(step, s, r)
        merged = merge_stages([row[0].state() for row in self.workers])
        return dict(merged.state_dict()) | below_loss(merged.loss_state_dict())

    def worker(self, stage: int, replica: int) -> Computation:
        """The computation of one replica of a stage."""
        whole = trainable_shapes(self.plain.model, self.plain.recipe.loss)
        trained = trainable_parameters(self.stages[stage], {shape.name for shape in whole})
        return Computation(
            self.modules[stage][replica],
            recipe=self.recipes[stage][replica],
            seed=self.plain.seed,
            recompute=False,
            replica=replica,
            replicas=self.replicas,
            stage_number=stage,
            ties=self.routes.ties,
            whole=whole,
            norm=self.plain.recipe.gradient_norm(),
            hooks=hooks_of(trained.items()),
        )

    def load(self, step: Step, indices: Sequence[int]) -> Batch:
        """The inputs and the target of a micro-batch."""
        batch = SeededDataset(self.plain.dataset, self.plain.seed, step.epoch).batch(indices, self.plain.collate)
        return self.plain.graph.signature.bind(batch.args, batch.kwargs), batch.target

    def forward(self, step: Step, m: int) -> None:
        """The forwards of a micro-batch in all stages."""
        sent: dict[str, Tensor] = {}
        for row, stage in zip(self.workers, self.stages, strict=True):
            worker = row[m % self.replicas]
            worker.passes.receive_activation(m, {name: sent[name].clone() for name in stage.receives})
            worker.forward(m)
            sent |= worker.passes.take_activations(m, stage.sends)

    def backward(self, step: Step, m: int) -> None:
        """The backwards of a micro-batch in all stages."""
        for s in reversed(range(len(self.stages))):
            worker = self.workers[s][m % self.replicas]
            worker.backward(m)
            found = worker.passes.take_gradients(m, self.stages[s].receives)
            for p in range(s):
                back = {name: gradient for name, gradient in found.items() if self.producer[name] == p}
                self.workers[p][m % self.replicas].passes.receive_gradient(m, s, back)

    def synchronise(self, step: Step) -> None:
        """Sum the gradients over the stages that share a parameter, and over replicas."""
        shared = [(tie, r) for tie in self.routes.ties for r in range(self.replicas)]
        for tie, r in shared:
            first = self.workers[tie.stages[0]][r]
            for s in tie.stages[1:]:
                first.tied.receive(self.workers[s][r].tied.gradients(tie.parameters))
            first.tied.add_received()
        for s in range(len(self.stages)) if self.replicas > 1 else ():
            for worker in self.workers[s]:
                worker.flatten()
            total = reduce(torch.add, [worker.flat.vector for worker in self.workers[s]])
            for r in range(self.replicas):
                self.take_sum(s, r, total)
        for tie, r in shared:
            sums = self.workers[tie.stages[0]][r].tied_sums(tie.parameters)
            for s in tie.stages[1:]:
                self.take_tied_sum(s, r, {name: gradient.clone() for name, gradient in sums.items()})

    def exchange_norms(self) -> None:
        """Tell all stages the norm of each stage's gradient, if a step depends on it."""
        for s, row in enumerate(self.workers):
            for r, worker in enumerate(row):
                if worker.norm.is_needed:
                    worker.measure_norm()
                    for other in self.workers:
                        other[r].norm.add_stage(s, worker.norm.squares(s))
                        if s == len(self.workers) - 1 and worker.norm.weight is not None:
                            other[r].norm.add_weight(worker.norm.weight)

    def take_sum(self, stage: int, replica: int, total: Tensor) -> None:
        """Give one replica the sum of all replicas' gradients."""
        self.workers[stage][replica].flat.vector.copy_(total)

    def take_tied_sum(self, stage: int, replica: int, sums: Mapping[str, Tensor]) -> None:
        """Give a stage that borrows tied parameters their gradients."""
        self.workers[stage][replica].tied.receive_sums(sums)

    def update(self, step: Step, stage: int, replica: int) -> None:
        """Take the optimiser's step in one replica."""
        self.workers[stage][replica].update()


def even_bounds(graph: LayerGraph, stages: int) -> list[tuple[int, int]]:
    """The layers of `graph` cut into stages of about as many each."""
    cuts = [round(len(graph.layers) * i / stages) for i in range(stages + 1)]
    return list(pairwise(cuts))


def _copied(stage: StageModule, recipe: Recipe) -> tuple[StageModule, Recipe]:
    """A copy of `stage`, and the recipe with the loss that it holds."""
    bundle, tensors = dump_stage(stage, recipe.loss)
    copied, loss = load_stage(bundle, {name: tensor.clone() for name, tensor in tensors.items()})
    return copied, replace(recipe, loss=loss)
