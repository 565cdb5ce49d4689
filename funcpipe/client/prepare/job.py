"""The job of a run: a model as layers, its plan, its loss, its optimiser and its data."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from torch import nn

from funcpipe.client.prepare.data import (
    SpreadSamples,
    Trial,
    check_processes,
    check_samples,
    open_with_first,
    sendable,
    spread_samples,
)
from funcpipe.client.prepare.evaluation import JobEvaluation, as_validation, make_evaluation
from funcpipe.client.prepare.joint_trial import JointTrial
from funcpipe.client.prepare.loss_calls import check_reach
from funcpipe.client.prepare.rehearsal import carried_by_loss, check_is_finite, rehearse, rehearse_shapes
from funcpipe.client.prepare.weights import ModelWeights
from funcpipe.core import Coupled, Plan, PlatformSpec, RunSettings, Validation, Wire, checks
from funcpipe.core.validation import LOSS
from funcpipe.errors import InvalidValue, PlanError
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.graph.equivalence import check_batch_sizes
from funcpipe.model.graph.isolation import in_turn, tried_in_turn
from funcpipe.model.graph.values import NOTHING_CARRIED, Carried, with_followed
from funcpipe.model.tensors import is_weightless
from funcpipe.platforms.base import Platform
from funcpipe.platforms.catalog import planned_spec
from funcpipe.training.averaging import followed, warn_of_copies
from funcpipe.training.batches import Batches, ShardedSamples, sharded_samples
from funcpipe.training.data import LoadedBatch, MapDataset, load_batch
from funcpipe.training.data_source import Data, DataSource, LoaderOptions, PreparedData
from funcpipe.training.first_batch import FirstBatch
from funcpipe.training.fragments import fragments_by_name
from funcpipe.training.norms import GradientNorm
from funcpipe.training.optimizers import ParameterShape, trainable_shapes
from funcpipe.training.output_cache import BatchLayout
from funcpipe.training.parameter_hooks import check_hooks
from funcpipe.training.plain import PlainTraining
from funcpipe.training.plain_rounds import LocalSteps
from funcpipe.training.recipe import Recipe, check_precision, no_optimizer
from funcpipe.training.state import ATTRIBUTES, MODEL, StageState, capture_state, select_for_stage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The `state` of the whole model after `epochs` epochs: the optimiser's part of it counts.

    Weights, buffers and attributes are those that the module has when the next run begins.
    """

    state: StageState
    epochs: int

    def check(self, stages: Iterable[nn.Module]) -> None:
        """Raise PlanError if the module has other parameters than those that were trained before."""
        for stage in stages:
            try:
                select_for_stage(self.state, stage)
            except PlanError as error:
                raise PlanError(
                    "the module has changed since this FuncPipe trained it, so that its optimiser cannot go on "
                    f"({error}); call reset() to begin with a new optimiser"
                ) from error

    def state_of(self, stage: nn.Module) -> StageState:
        """The initial state of `stage`: its present tensors and attributes, and the optimiser as it was."""
        selected, now = select_for_stage(self.state, stage), capture_state(stage, None, GradientNorm())
        others = {name: tensor for name, tensor in selected.tensors.items() if not name.startswith(MODEL)}
        settings = {**selected.settings, **{key: now.settings[key] for key in (ATTRIBUTES,) if key in now.settings}}
        return replace(now, tensors={**others, **now.tensors}, settings=settings)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training: the model, the data, and the length.

    `dataset` is called in every function that reads data, unless it returns tensors that are in memory here already;
    `loading` says how samples are loaded. `prices` is the platform whose prices the bill is made with.
    `parameters` are the trainable ones of the model, in its order, and then of the loss; `loss_carried` is what calls
    of the loss leave for the next ones. `layout` is how outputs lie side by side, for a loss of the whole batch.
    `shards` is how the samples lie in shards, if they do. It is validated as `evaluation` says; a job of no epochs only
    evaluates. `weights` are those of the model that functions read from files.
    """

    graph: LayerGraph
    plan: Plan
    recipe: Recipe
    dataset: Callable[[], MapDataset]
    samples: int
    epochs: int
    seed: int
    shuffle: bool
    message_deadline_s: float
    prices: PlatformSpec
    parameters: tuple[ParameterShape, ...] = ()
    loss_carried: Carried = NOTHING_CARRIED
    layout: BatchLayout | None = None
    loading: LoaderOptions = field(default_factory=LoaderOptions)
    shards: ShardedSamples | None = None
    drop_last: bool = False
    evaluation: JobEvaluation | None = None
    weights: ModelWeights | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", replace(self.plan, request=None))  # its profile is no use to functions

    @property
    def batches(self) -> Batches:
        """The samples as dealt out over steps; raises DataError if they do not fill one global batch."""
        return Batches(
            samples=self.samples,
            global_batch=self.plan.global_batch,
            micro_batch=self.plan.micro_batch,
            seed=self.seed,
            shuffle=self.shuffle,
            shards=self.shards,
            drop_last=self.drop_last,
        )

    @property
    def steps(self) -> int:
        """Training steps of all epochs."""
        return self.epochs * self.batches.steps_per_epoch

    @property
    def trainable(self) -> tuple[ParameterShape, ...]:
        """The trainable parameters of model and loss, those of the graph's module where none are given."""
        return self.parameters or trainable_shapes(self.graph.module, self.recipe.loss)

    def expected_s(self, done: int) -> float | None:
        """The expected seconds of the steps after the first `done`; None if the plan has no estimate."""
        estimate = self.plan.estimate
        return None if estimate is None else (self.steps - done) * (estimate.iteration_s + estimate.overhead_s)

    def check_on(self, platform: Platform, done: int) -> None:
        """Raise InputError if what is left after `done` steps cannot run on `platform`, as far as can be known."""
        platform.check(self.plan, run_s=self.expected_s(done))
        if self.weights is not None:
            self.weights.check_reachable(platform.url)

    def prepared_data(self) -> PreparedData:
        """The training data as it is sent. Raises DataError."""
        return sendable(self.dataset, self.loading)

    def local_steps(self) -> LocalSteps | None:
        """How often replicas that train alone meet; None where they do not train alone."""
        plan, named = self.plan, dict[str, int]()
        if plan.trains_locally and plan.sync_fragments > 1:
            named = fragments_by_name(self.graph, plan, self.recipe.loss)
        return LocalSteps.of(plan, named)

    @in_turn()
    def plain_training(self, model: nn.Module) -> PlainTraining:
        """The first epoch of this job as plain PyTorch does it to `model`, from which the graph was made."""
        return PlainTraining(
            model=model,
            graph=self.graph,
            dataset=self.dataset(),
            steps=tuple(self.batches.epoch(0)),
            recipe=self.recipe,
            seed=self.seed,
            rounding=max(self.recipe.precision.rounding, *(wire.rounding for wire in self.plan.wires)),
            in_blocks=Wire.INT8 in self.plan.wires,
            collate=self.loading.collate,
            layout=self.layout,
            replicas=self.plan.replicas,
            local=self.local_steps(),
        )


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A module with its way of learning.

    `blocks` are the paths of modules to trace as one layer each, besides those of the plan. It goes on with what it has
    `learned` before, if it has. `logged_notes` on the model are not logged again. `weights` are those that lie in
    files.
    """

    model: nn.Module
    recipe: Recipe
    blocks: tuple[str, ...] = ()
    learned: Learned | None = None
    logged_notes: set[str] = field(default_factory=set)
    weights: ModelWeights | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """The number of epochs and the order of samples; with `steps`, only those of the first that many steps."""

    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    steps: int | None = None

    def __post_init__(self) -> None:
        checks.whole("epochs", self.epochs, 1)
        checks.whole("seed", self.seed, 0)
        if self.steps is not None:
            checks.whole("steps", self.steps, 1)


@tried_in_turn
def make_job(
    learner: Learner,
    dataset: Data,
    plan: Plan,
    order: SampleOrder,
    settings: RunSettings,
    validation: Validation | Data | None = None,
    *,
    spec: PlatformSpec | None = None,
) -> Job:
    """The job of training `learner` on `dataset`, at the prices of `spec` unless `settings` have others.

    `dataset` may be a factory of one, or the URL of one in object storage. The module is traced, and compared with its
    layers for the batch sizes of the run; the dataset, or its factory, is tried, and the first micro-batch is trained
    on and forgotten, if that is wanted. Neither is changed. Raises ModelError, DataError, or PlanError for a plan in
    another precision.
    """
    if learner.recipe.optimizer is no_optimizer:
        no_optimizer([])
    follows = followed(learner.recipe.teachers, learner.model)
    warn_of_copies(learner.recipe.teachers, learner.model)
    check_reach(learner.model, learner.recipe.loss)
    if plan.estimate is not None:
        check_precision("plan", plan.precision, learner.recipe)
    factory, source, opening = open_with_first(dataset, learner.model, micro_batch=plan.micro_batch)
    made, first = source.dataset, opening.batch
    if not hasattr(made, "shard_sizes"):
        load_batch(made, [len(made) - 1], source.options.collate)  # as long as it says
    samples = len(made) if order.steps is None else min(len(made), order.steps * plan.global_batch)
    graph = trace(
        learner.model,
        first.args,
        first.kwargs,
        blocks=tuple({*learner.blocks, *plan.blocks}),
        precision=learner.recipe.precision,
        collated=opening.collated,
        logged_notes=learner.logged_notes,
    )
    graph = with_followed(graph, learner.model, follows)
    check_hooks(learner.model, tuple(graph.module.parameters()))
    job = Job(
        graph=graph,
        plan=plan,
        recipe=learner.recipe,
        dataset=factory,
        samples=samples,
        epochs=order.epochs + (0 if learner.learned is None else learner.learned.epochs),
        seed=order.seed,
        shuffle=order.shuffle if source.shuffle is None else source.shuffle,
        loading=source.options,
        message_deadline_s=settings.message_deadline_s,
        prices=settings.prices or spec or planned_spec(plan),
        parameters=trainable_shapes(learner.model, learner.recipe.loss),
        shards=sharded_samples(
            made, samples, dataset_samples=len(made), micro_batch=plan.micro_batch, replicas=plan.replicas
        ),
        drop_last=source.drop_last,
        weights=learner.weights,
    )
    job = _tried(job, learner, source, opening, rehearses=settings.rehearse)
    return job if validation is None else _validated(job, learner, as_validation(validation))


def _tried(job: Job, learner: Learner, source: DataSource, opening: FirstBatch, *, rehearses: bool) -> Job:
    """Try samples of `source` and, if the job `rehearses`, its first step with the micro-batch `opening`, and the
    processes that load.

    Returns `job` with what calls of the loss leave for the next ones, and how outputs lie side by side. Raises
    DataError or ModelError.
    """
    model, recipe, first, dataset = learner.model, learner.recipe, opening.batch, source.dataset
    inputs = job.graph.signature.bind(first.args, first.kwargs)
    check_batch_sizes(job.graph, model, inputs, job.batches.micro_batch_sizes, collated=opening.collated)
    trials: tuple[Trial, ...] = ()
    if not hasattr(dataset, "shard_sizes"):
        cut = opening.collated is None
        trials = check_samples(job.graph, model, dataset, job.loading.collate, job.batches, cut=cut)
    _warn_of_counts(job)
    if recipe.coupled is Coupled.ACCUMULATE:
        _log.warning("losses are means over %s, whatever the loss makes of a whole batch", recipe.loss_over)
    spread, joint = _spread(job, dataset, first) if rehearses or not is_weightless(model) else None, None
    compared = spread if recipe.coupled is Coupled.REFUSE else None
    if is_weightless(model):
        if not rehearses:
            return job
        return replace(job, loss_carried=rehearse_shapes(model, recipe, first, seed=job.seed, spread=compared))
    if spread is not None and recipe.coupled is Coupled.CACHE:
        joint = JointTrial.of(model, recipe, spread)
        job = replace(job, layout=joint.layout)
    if not rehearses:
        return replace(job, loss_carried=carried_by_loss(model, recipe, first, seed=job.seed))
    check_processes(job.graph, job.dataset, source, job.batches, seed=job.seed)
    for trial in trials[1:]:  # the first sample is rehearsed with
        check_is_finite(model, recipe, trial.batch, index=trial.index, seed=job.seed)
    return replace(job, loss_carried=rehearse(model, recipe, first, seed=job.seed, spread=compared, joint=joint))


def _warn_of_counts(job: Job) -> None:
    """Warn that forwards change the state they leave for each other more often than in a script."""
    carried, forwards = job.graph.carried, job.plan.micro_batches
    if carried.names and forwards > 1:
        _log.warning(
            "each forward leaves %s for the next one, and a global batch takes %d forwards, where a script on whole "
            "batches makes one: what counts forwards counts micro-batches, and averages move once for each",
            carried.listed,
            forwards,
        )


def _spread(job: Job, dataset: MapDataset, first: LoadedBatch) -> SpreadSamples | None:
    """Samples to try the loss on; None where each global batch is one micro-batch, so that nothing is missed."""
    batches = job.batches
    if min(batches.global_batch, job.samples) <= batches.micro_batch:
        return None
    return spread_samples(
        dataset,
        job.loading.collate,
        first=first,
        samples=job.samples,
        micro_batch=batches.micro_batch,
        global_batch=batches.global_batch,
    )


def _validated(job: Job, learner: Learner, validation: Validation) -> Job:
    """`job` with the model in eval mode, which has the same blocks."""
    known = (LOSS, *validation.metrics)
    if job.recipe.scheduler is not None and job.recipe.scheduler_monitor not in known:
        raise InvalidValue("scheduler_monitor", job.recipe.scheduler_monitor, f"must be one of {', '.join(known)}")
    evaluation = make_evaluation(
        learner.model,
        validation.data,
        job.plan,
        loss=job.recipe.cast_loss,
        metrics=validation.metrics,
        blocks=job.graph.blocks,
        precision=job.recipe.precision,
        every=validation.interval(job.batches.steps_per_epoch),
        monitor=validation.watched,
    )
    return replace(job, evaluation=evaluation)
