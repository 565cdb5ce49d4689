"""The stages and the data of a run as they are sent to functions."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from funcpipe.client.prepare.frozen import JobBase, make_base, mark_fixed
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.weights import weights_of
from funcpipe.core import Coupled, Routes, TensorProfile, TiedParameter, find_routes, stages_of_layers
from funcpipe.errors import ModelError, PlanError
from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.isolation import in_turn
from funcpipe.model.split import StageModule, dump_stage, split, stage_bounds
from funcpipe.model.split.cut import check_shared
from funcpipe.model.split.stage import attach_loss, kept_names
from funcpipe.model.tensors import fingerprint
from funcpipe.runstate.base import StoredBase
from funcpipe.training.data_source import PreparedData, of_evaluation
from funcpipe.training.evaluation import StageEvaluation
from funcpipe.training.losses import loss_of_output
from funcpipe.training.optimizer_division import check_sharding, check_stages
from funcpipe.training.parameter_hooks import NO_HOOKS, NamedHooks, hooks_of, listed
from funcpipe.training.recipe import check_alone
from funcpipe.training.stage_job import StageJob
from funcpipe.training.stage_optimizer import trainable_parameters


@dataclass(frozen=True, kw_only=True)
class PreparedStage:
    """A stage that can be sent: the module, its code as bytes, and its tensors by name; `base` has those of all stages
    that no step changes.
    """

    module: StageModule
    bundle: bytes
    tensors: dict[str, Tensor]
    base: JobBase = field(default_factory=JobBase)


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a run: what it trains on, and what it is evaluated on, as far as it does."""

    training: PreparedData | None
    evaluation: PreparedData | None

    @classmethod
    def of(cls, job: Job) -> "RunData":
        """The data of `job`. Raises DataError if it cannot be sent."""
        return cls(
            training=job.prepared_data() if job.epochs else None,
            evaluation=None if job.evaluation is None else job.evaluation.prepared_data(),
        )

    def objects(self) -> Iterator[tuple[str, bytes | memoryview]]:
        """All its objects, by their names."""
        if self.training is not None:
            yield from self.training.objects()
        if self.evaluation is not None:
            yield from ((of_evaluation(name), contents) for name, contents in self.evaluation.objects())


@in_turn()
def make_stages(
    job: Job, data: RunData, before: StoredBase | None = None, *, divides: bool = True
) -> tuple[PreparedStage, ...]:
    """The stages of the job's plan, each with all that its functions need of the job.

    A run that goes on has the base that it had `before`. Unless this `divides`, what no step changes is sent with the
    rest.

    Raises DataError, PlanError or ModelError for a job that cannot be cut into them.
    """
    if not job.epochs:
        none = JobBase()
        return tuple(_prepared_stage(job, one.routes, one.stage, data, one, none) for one in _evaluated(job, data))
    _check_joint(job)
    _ = job.batches  # which raises DataError if the data is not enough
    bounds = stage_bounds(job.graph, job.plan)
    _check_order(job)
    if job.plan.trains_locally:
        check_alone(job.recipe)
    routes = _routes(job.graph, stages_of_layers(bounds))
    if job.plan.divides_optimizer:
        if job.recipe.exchanges_norms:
            raise PlanError(
                "the plan divides the optimiser over replicas, each of which updates its split before the norm of the "
                "whole gradient is known, or the weight of a loss with a reduction; train without clip_grad_norm, "
                "precision='fp16', on_nan='skip' and reduction, or plan without shard_optimizer"
            )
        _check_hooks(job)
    stages = split(job.graph, bounds)
    attach_loss(stages[-1], job.recipe.loss, job.loss_carried)
    _check_optimizer(job, routes, stages)
    if divides:
        mark_fixed(stages, job.recipe.teachers)
    base = make_base(stages, job.weights, job.seed, before)
    if job.evaluation is None:
        return tuple(_prepared_stage(job, routes, stage, data, None, base) for stage in stages)
    evaluated = _evaluated(job, data)
    check_shared([one.stage for one in evaluated], stages)
    return tuple(
        _prepared_stage(job, routes, stage, data, one, base) for stage, one in zip(stages, evaluated, strict=True)
    )


def _check_optimizer(job: Job, routes: Routes, stages: Sequence[StageModule]) -> None:
    """Raise PlanError if stages, or replicas of one, would train otherwise than one optimiser for all parameters."""
    factory, shapes = job.recipe.optimizer, job.trainable
    own = [trainable_parameters(stage, {shape.name for shape in shapes}).keys() for stage in stages]
    layers = job.graph.layers
    check_stages(factory, shapes, own, together=(layers[0].name, layers[-1].name))
    if job.plan.divides_optimizer:
        check_sharding(factory, shapes, own, routes)


def _evaluated(job: Job, data: RunData) -> list[StageEvaluation]:
    assert job.evaluation is not None, "the job evaluates"
    assert data.evaluation is not None, "on data of its own"
    return job.evaluation.stages(job.plan, data.evaluation.stored, _routes)


def _hooks_of(job: Job, stage: StageModule) -> NamedHooks:
    if not job.epochs:
        return NO_HOOKS
    return hooks_of(trainable_parameters(stage, {shape.name for shape in job.trainable}).items())


def _check_hooks(job: Job) -> None:
    """Raise PlanError for hooks of parameters whose gradients no replica has as a whole."""
    names = hooks_of(job.graph.module.named_parameters())
    if names:
        raise PlanError(
            f"the plan divides the optimiser over replicas, each of which sees a part of the gradient only, but the "
            f"hooks of {listed(names)} take the whole; plan without shard_optimizer, or remove the hooks"
        )


def _check_order(job: Job) -> None:
    """Raise PlanError if replicas would run micro-batches side by side of which each needs what the last one left, or
    if the loss would be called more often than in one process; a joint loss is called once by each replica.
    """
    carried = job.graph.carried
    if carried.names and job.plan.replicas > 1:
        raise PlanError(
            f"the plan has {job.plan.replicas} replicas, but each forward of {job.graph.name} leaves "
            f"{carried.listed} for the next one, so that micro-batches must follow each other; "
            f"plan with {carried.way_out}"
        )
    plan, names = job.plan, job.loss_carried.names
    calls = plan.replicas if plan.joint_loss else math.ceil(plan.global_batch / plan.micro_batch)
    if names and calls > 1:
        whole = job.plan.global_batch
        raise PlanError(
            f"each call of the loss leaves {kept_names(job.loss_carried)} for the next one, and the plan calls it "
            f"{calls} times for a global batch of {whole} samples, where one process calls it once; plan with one "
            "replica and coupled='cache', or with micro-batches of the whole global batch, "
            f"profile(micro_batch={whole}) and optimize(global_batch={whole}), or put modules of the loss in eval mode "
            "whose statistics are not to change"
        )


def _check_joint(job: Job) -> None:
    joint = job.recipe.coupled is Coupled.CACHE
    if joint is job.plan.joint_loss:
        return
    if joint:
        raise PlanError(
            "the loss is to be computed for whole global batches (coupled='cache'), and the plan computes it for each "
            "micro-batch: plan with FuncPipe(…, coupled='cache').optimize, or with `funcpipe optimize --set "
            "plan.coupled=cache`"
        )
    raise PlanError(
        "the plan computes the loss for whole global batches, from outputs that are kept: train with coupled='cache' "
        f"(--set training.coupled=cache), not {job.recipe.coupled.value!r}, or plan again without it"
    )


def _prepared_stage(
    job: Job, routes: Routes, stage: StageModule, data: RunData, evaluation: StageEvaluation | None, base: JobBase
) -> PreparedStage:
    training = data.training if stage.inputs or stage.is_last else None
    beside = [] if evaluation is None or evaluation.stage is stage else [evaluation.stage]
    weights = weights_of(job.weights, base, [stage, *beside])
    stage_job = StageJob(
        routes=routes,
        signature=job.graph.signature,
        recipe=job.recipe if stage.is_last else replace(job.recipe, loss=loss_of_output),  # whose tensors it needs not
        data=None if training is None else training.stored,
        samples=job.samples,
        shuffle=job.shuffle,
        parameters=job.trainable,
        shards=job.shards,
        drop_last=job.drop_last,
        evaluation=evaluation,
        hooks=_hooks_of(job, stage),
        layout=job.layout if stage.is_last else None,
        weights=weights,
    )
    elsewhere = () if weights is None else (*weights.stored, *weights.made)
    bundle, tensors = dump_stage(stage, stage_job, elsewhere=elsewhere, beside=beside)
    unknown = [name for name, tensor in tensors.items() if fingerprint(tensor) is not None]
    if unknown:
        raise ModelError(
            f"the stage from layer {stage.program.layers[0].name} holds a tensor that follows from weights, which are "
            f"not here ({unknown[0]}); compute it in the forward"
        )
    return PreparedStage(module=stage, bundle=bundle, tensors=tensors, base=base)


def _routes(graph: LayerGraph, stage_of_layer: Sequence[int]) -> Routes:
    tensors = [
        TensorProfile(
            name=value.name,
            producer=value.producer,
            consumers=value.consumers,
            forward_bytes=value.bytes,
            backward_bytes=value.bytes if value.differentiable else 0,
        )
        for value in graph.values
    ]
    ties = [TiedParameter(name=tie.names[0], layers=tie.layers, parameter_bytes=tie.bytes) for tie in graph.ties]
    return find_routes(stage_of_layer, tensors, ties)
