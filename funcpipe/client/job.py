"""What is to be trained: a model as layers, its plan, its loss, its optimiser and its data."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from funcpipe.core import Plan, PlatformSpec, RunSettings, checks
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.graph.batch_sizes import check_batch_sizes
from funcpipe.platforms.catalog import load_spec
from funcpipe.training.adapters import DatasetFactory
from funcpipe.training.data import Batches, MapDataset, load_batch
from funcpipe.training.passes import LossFunction
from funcpipe.training.plain import PlainTraining
from funcpipe.training.stage_optimizer import OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, on what, and for how long.

    `dataset` is called in every function that reads data. `prices` is the platform whose prices the bill is made with.
    """

    graph: LayerGraph
    plan: Plan
    loss: LossFunction
    optimizer: OptimizerFactory
    dataset: Callable[[], MapDataset]
    samples: int
    epochs: int
    seed: int
    shuffle: bool
    message_deadline_s: float
    prices: PlatformSpec
    clip_grad_norm: float | None = None

    def __post_init__(self) -> None:
        if self.clip_grad_norm is not None:
            checks.positive("clip_grad_norm", self.clip_grad_norm)

    @property
    def batches(self) -> Batches:
        """How the samples are dealt out over steps; raises DataError if they do not fill one global batch."""
        return Batches(
            samples=self.samples,
            global_batch=self.plan.global_batch,
            micro_batch=self.plan.micro_batch,
            seed=self.seed,
            shuffle=self.shuffle,
        )

    @property
    def steps(self) -> int:
        """Training steps of all epochs."""
        return self.epochs * self.batches.steps_per_epoch

    def plain_training(self, model: nn.Module) -> PlainTraining:
        """The first epoch of this job as plain PyTorch does it to `model`, from which the graph was made."""
        return PlainTraining(
            model=model,
            graph=self.graph,
            dataset=self.dataset(),
            steps=tuple(self.batches.epoch(0)),
            loss=self.loss,
            optimizer=self.optimizer,
            seed=self.seed,
            clip_grad_norm=self.clip_grad_norm,
            rounding=max(wire.rounding for wire in (self.plan.wire, self.plan.gradient_wire)),
        )


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A module with its loss and its optimiser; gradients are clipped to the norm `clip_grad_norm`, if it is given.

    `blocks` are the paths of modules to trace as one layer each, besides those of the plan.
    """

    model: nn.Module
    loss: LossFunction
    optimizer: OptimizerFactory
    clip_grad_norm: float | None = None
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """How often, and in which order, samples are trained on; with `steps`, only those of the first that many steps."""

    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    steps: int | None = None


def make_job(
    learner: Learner,
    dataset: MapDataset | Callable[[], MapDataset],
    plan: Plan,
    order: SampleOrder,
    settings: RunSettings,
) -> Job:
    """The job of training `learner` on `dataset`.

    The module is traced, and compared with its layers for the batch sizes of the run; the dataset, or its factory, is
    tried. Neither is changed. Raises ModelError or DataError.
    """
    factory = dataset if callable(dataset) else DatasetFactory(dataset)
    made = factory()
    first = load_batch(made, range(min(plan.micro_batch, len(made))))
    graph = trace(learner.model, first.args, first.kwargs, blocks=tuple({*learner.blocks, *plan.blocks}))
    job = Job(
        graph=graph,
        plan=plan,
        loss=learner.loss,
        optimizer=learner.optimizer,
        dataset=factory,
        samples=len(made) if order.steps is None else min(len(made), order.steps * plan.global_batch),
        epochs=order.epochs,
        seed=order.seed,
        shuffle=order.shuffle,
        message_deadline_s=settings.message_deadline_s,
        prices=settings.prices or load_spec(plan.platform),
        clip_grad_norm=learner.clip_grad_norm,
    )
    inputs = graph.signature.bind(first.args, first.kwargs)
    check_batch_sizes(graph, learner.model, inputs, job.batches.micro_batch_sizes)
    return job
