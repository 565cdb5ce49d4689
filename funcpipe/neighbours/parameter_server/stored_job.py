"""A job as a parameter server trains it: the whole model is one stage, sent to the server and to all workers."""

from collections.abc import Sequence

from torch.optim.lr_scheduler import ReduceLROnPlateau

from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.stages import RunData, make_stages
from funcpipe.core import Coupled, Plan, ScheduleKind, Stage, Sync, Wire
from funcpipe.errors import PlanError
from funcpipe.model.split.stage import of_loss, trained_by
from funcpipe.neighbours.parameter_server.replica import ServerJob, data_key
from funcpipe.neighbours.parameter_server.values import Updates
from funcpipe.platforms.base import Storage
from funcpipe.training.recipe_trial import made_optimizer, small_parameters


def one_stage(layers: Sequence[str], global_batch: int, micro_batch: int) -> Plan:
    """The plan of a model that is not cut."""
    return Plan(
        global_batch=global_batch,
        micro_batch=micro_batch,
        replicas=1,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.THREE_PHASE,
        wire=Wire.FP32,
        platform="local",
        stages=(Stage(first=0, stop=max(len(layers), 1), size="machine", memory_mb=1, layers=tuple(layers)),),
    )


def check_servable(job: Job, updates: Updates) -> None:
    """Raise PlanError for what a parameter server cannot train as one process would."""
    recipe, carried = job.recipe, job.graph.carried
    if carried.names:
        raise PlanError(
            f"each forward of {job.graph.name} leaves {carried.listed} for the next one, so that micro-batches must "
            f"follow each other; train it by a plan with {carried.way_out}"
        )
    if trained_by(recipe.loss) or job.loss_carried.names:
        what = next(iter(of_loss(trained_by(recipe.loss))), "") or job.loss_carried.names[0]
        raise PlanError(
            f"the loss holds {what}, which changes in training, and a parameter server has the model's parameters "
            "only; train it by a plan (train), or hold it in the model, whose forward returns the loss"
        )
    if recipe.precision.scales_loss:
        raise PlanError(
            "a parameter server does not share a loss scale with its workers; train with precision='bf16' or 'fp32'"
        )
    if recipe.coupled is Coupled.CACHE:
        raise PlanError(
            "a parameter server's workers do not see each other's outputs, from which coupled='cache' computes the "
            "loss; train by a plan (train)"
        )
    if recipe.is_weighted:
        raise PlanError(
            "a parameter server does not learn the weights of losses; train by a plan, or with a loss that is a mean "
            "over samples, without reduction"
        )
    if recipe.scheduler is not None:
        optimizer = made_optimizer(recipe.optimizer, small_parameters(job.trainable))
        if isinstance(recipe.scheduler(optimizer), ReduceLROnPlateau):
            raise PlanError(
                "a parameter server does not validate, which ReduceLROnPlateau needs; take another schedule"
            )
    if updates is Updates.ASP and job.recipe.average is not None:
        raise PlanError("an average over asynchronous updates depends on their order; train by BSP, or without average")
    if updates is Updates.ASP and job.recipe.teachers:
        raise PlanError("a teacher that follows asynchronous updates depends on their order; train by BSP")


def stored_job(job: Job, storage: Storage, run: str) -> ServerJob:
    """`job` as it is sent; its data is put into `storage`. Raises DataError, PlanError or ModelError."""
    data = RunData.of(job)
    (stage,) = make_stages(job, data)
    for name, contents in data.objects():
        storage.put(data_key(run, name), contents)
    return ServerJob(bundle=stage.bundle, tensors=stage.tensors, seed=job.seed)
