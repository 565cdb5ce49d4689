"""What `funcpipe verify` says of runs with a mistake planted around the model: in what losses, hooks, modes, clipping,
teachers and optimisers need. It must find every one, and pass the runs without.

Small networks that draw nothing, in two stages of two replicas, are compared with training on whole batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.model.graph import trace
from funcpipe.model.graph.values import with_followed
from funcpipe.training.averaging import Teacher, TeacherUpdate, followed
from funcpipe.training.batches import Batches, Step
from funcpipe.training.computation import Computation
from funcpipe.training.parameter_hooks import NO_HOOKS, ParameterHooks
from funcpipe.training.plain import PlainTraining
from funcpipe.training.recipe import Recipe, recipe_with
from funcpipe.training.verify import TOLERANCE, Verification, verify_run
from tests.jobs.composed import GlobalRate
from tests.support.in_turn import InTurn, even_bounds

STAGES, REPLICAS, STEPS = 2, 2, 3
MICRO_BATCH, GLOBAL_BATCH, WIDTH, CLASSES = 4, 16, 8, 3
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Network(nn.Module):
    """A stem with BatchNorm that stays in eval mode, blocks, and a teacher of the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def train(self, mode: bool = True) -> "Network":
        super().train(mode)
        self.stem.eval()
        return self

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x + 0.5 * torch.tanh(self.teacher(x)))


class Margin(nn.Module):
    """A loss with centres of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, output: Tensor, target: Tensor) -> Any:
        return F.cross_entropy(F.normalize(output) @ F.normalize(self.centres).T * 4, target)


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the samples of two classes, and how many those are."""
    kept = target != 0
    return (F.cross_entropy(output, target, reduction="none") * kept).sum(), kept.sum()


def masked(model: Network) -> None:
    mask = torch.arange(float(WIDTH)).gt(3).float()
    model.blocks[0].weight.register_hook(lambda gradient: gradient * mask)  # type: ignore[operator]


def bounded(model: Network) -> None:
    model.blocks[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[operator]


class NoHooks(InTurn):
    """Hooks of parameters are lost."""

    def worker(self, stage: int, replica: int) -> Computation:
        made = super().worker(stage, replica)
        made._hooks = ParameterHooks(NO_HOOKS, {}, seed=0)
        return made


class HooksBeforeTheSum(NoHooks):
    """Hooks see the gradient of one replica, before it is summed."""

    def synchronise(self, step: Step) -> None:
        for row in self.workers:
            for worker in row:
                for parameter in _named(worker, "blocks.0.weight"):
                    assert parameter.grad is not None
                    parameter.grad.clamp_(-1e-3, 1e-3)
        super().synchronise(step)


class FrozenLoss(InTurn):
    """What a loss holds is not trained."""

    def update(self, step: Step, stage: int, replica: int) -> None:
        own = _named(self.workers[stage][replica], "<loss>.centres")
        kept = [parameter.detach().clone() for parameter in own]
        super().update(step, stage, replica)
        for parameter, values in zip(own, kept, strict=True):
            parameter.data.copy_(values)


class SamplesAsWeights(InTurn):
    """The sum of a weighted loss is divided by the number of samples."""

    def exchange_norms(self) -> None:
        super().exchange_norms()
        for row in self.workers:
            for worker in row:
                worker.norm.add_weight(1.0)


class ClippedByStage(InTurn):
    """Each stage clips by the norm of its own gradient."""

    def exchange_norms(self) -> None:
        for row in self.workers:
            for worker in row:
                worker.measure_norm()


class ClippedBeforeTheSum(InTurn):
    """Elements are clipped in each replica, before gradients are summed."""

    def synchronise(self, step: Step) -> None:
        for row in self.workers:
            for worker in row:
                nn.utils.clip_grad_value_([p for p in worker.parameters if p.grad is not None], 1e-3)
        super().synchronise(step)


class StemTrains(InTurn):
    """The model's own train() is not called."""

    def worker(self, stage: int, replica: int) -> Computation:
        for module in self.modules[stage][replica].modules():
            module.training = True
        return super().worker(stage, replica)


class StaleTeacher(InTurn):
    """The teacher stays as it was."""

    def worker(self, stage: int, replica: int) -> Computation:
        made = super().worker(stage, replica)
        made._teachers = TeacherUpdate((), made.passes._stage)
        return made


class EarlyTeacher(StaleTeacher):
    """The teacher follows before the optimiser's step."""

    def update(self, step: Step, stage: int, replica: int) -> None:
        worker = self.workers[stage][replica]
        TeacherUpdate(self.plain.recipe.teachers, worker.passes._stage).after_step(step.number)
        super().update(step, stage, replica)


class RateByStage(InTurn):
    """Each stage's optimiser sees its own parameters, though it looks at all of them."""


def _named(worker: Computation, name: str) -> list[nn.Parameter]:
    return [p for own, p in worker.passes._stage.named_parameters() if own == name]


@dataclass(frozen=True)
class Planted:
    """A mistake, and the job in which it shows."""

    fault: type[InTurn]
    recipe: Callable[[], Recipe]
    prepare: Callable[[Network], None] = lambda model: None
    always: bool = False

    def verdict(self, kind: type[InTurn]) -> Verification:
        """What `verify` says of a run that is trained by `kind`."""
        torch.manual_seed(3)
        model, recipe = Network(), self.recipe()
        self.prepare(model)
        samples = [(torch.randn(WIDTH), torch.tensor(i * i % CLASSES)) for i in range(GLOBAL_BATCH * STEPS - 2)]
        batches = Batches(
            samples=len(samples), global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=0, shuffle=False
        )
        graph = trace(model, (torch.stack([x for x, _ in samples[:2]]),))
        plain = PlainTraining(
            model=model,
            graph=with_followed(graph, model, followed(recipe.teachers, model)),
            dataset=samples,
            steps=tuple(batches.epoch(0)),
            recipe=recipe,
            seed=0,
        )
        found = kind(plain, even_bounds(plain.graph, STAGES), REPLICAS).train()
        return verify_run(found, plain, steps=STEPS, tolerance=TOLERANCE)


def recipe(loss: Callable[[], Any] = lambda: F.cross_entropy, optimizer: Any = SGD, **keywords: Any) -> Recipe:
    return recipe_with(loss(), optimizer, keywords)  # type: ignore[arg-type]


TEACHER = Teacher(student="blocks.2", teacher="teacher", decay=0.5)
PLANTED: Sequence[Planted] = (
    Planted(NoHooks, recipe, masked),
    Planted(HooksBeforeTheSum, recipe, bounded),
    Planted(FrozenLoss, partial(recipe, Margin)),
    Planted(SamplesAsWeights, partial(recipe, lambda: counted, reduction="weighted")),
    Planted(ClippedByStage, partial(recipe, clip_grad_norm=0.05)),
    Planted(ClippedBeforeTheSum, partial(recipe, clip_grad_value=1e-3)),
    Planted(StemTrains, recipe),
    Planted(StaleTeacher, partial(recipe, teachers=TEACHER)),
    Planted(EarlyTeacher, partial(recipe, teachers=TEACHER)),
    Planted(RateByStage, partial(recipe, optimizer=partial(GlobalRate, lr=0.05)), always=True),
)


def main() -> None:
    torch.set_num_threads(1)
    for planted in PLANTED:
        for kind in (planted.fault,) if planted.always else (InTurn, planted.fault):
            found = planted.verdict(kind)
            first = found.first_difference
            text = (
                f"equal on {found.reference.value}"
                if first is None
                else f"DIFFERS: {first.name} {first.difference:.1e}"
            )
            title = f"no mistake, for {planted.fault.__name__}" if kind is InTurn else (kind.__doc__ or "").strip()
            print(f"{title:78} {text}", flush=True)


if __name__ == "__main__":
    main()
