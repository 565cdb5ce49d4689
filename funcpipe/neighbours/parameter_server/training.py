"""A job as a parameter server trains it, on any worker group: what is sent, its settings and its result.

The whole model is one stage, sent to the server and to all workers.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.stages import RunData, make_stages
from funcpipe.core import Coupled, Plan, ScheduleKind, Stage, Sync, Wire
from funcpipe.core.provision import CostItem
from funcpipe.errors import PlanError
from funcpipe.model.split.stage import of_loss, trained_by
from funcpipe.neighbours.parameter_server.loops import (
    History,
    LoopConfig,
    Watch,
    nothing_changes,
    train_asynchronously,
    train_synchronously,
)
from funcpipe.neighbours.parameter_server.server import ServerJob, data_key
from funcpipe.neighbours.parameter_server.worker_group import PushRecord, Updates, WorkerGroup
from funcpipe.platforms.base import Storage
from funcpipe.runstate.renewal import Renewal
from funcpipe.training.optimizers import made_optimizer, small_parameters


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
    (stage,) = make_stages(job, data, divides=False)
    for name, contents in data.objects():
        storage.put(data_key(run, name), contents)
    return ServerJob(bundle=stage.bundle, tensors=stage.tensors, seed=job.seed)


class TrainedWorkerGroup(WorkerGroup, Protocol):
    """A worker group that has the trained model."""

    def state_dict(self) -> dict[str, Tensor]:
        """The model's `state_dict`."""


@dataclass(frozen=True, kw_only=True)
class ServerResult:
    """The result of training around a parameter server, with its cost.

    `losses` are those of synchronous steps, `step_s` the seconds that each took, `computed_by` the samples of each by
    worker. `pushes` are those of asynchronous training, with their staleness. `lost` names workers that were lost.
    `bill` has an item for each machine; machines that are not of the market are not in it.
    """

    run: str
    updates: Updates
    seconds: float
    state: Mapping[str, Tensor]
    losses: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    computed_by: tuple[Mapping[str, int], ...] = ()
    pushes: tuple[PushRecord, ...] = ()
    lost: tuple[str, ...] = ()
    server_restarts: int = 0
    bill: tuple[CostItem, ...] = ()

    @property
    def usd(self) -> float:
        """All dollars."""
        return sum(item.usd for item in self.bill)

    def state_dict(self) -> dict[str, Tensor]:
        """The trained `state_dict`."""
        return dict(self.state)


@dataclass(frozen=True, kw_only=True)
class ServerRun:
    """The settings of training: the batches, the kind of updates, the saves, and the watch of the cluster."""

    global_batch: int
    micro_batch: int
    updates: Updates = Updates.BSP
    save_every: int = 0
    watch: Watch = nothing_changes


def trained(job: Job, group: TrainedWorkerGroup, run: ServerRun, name: str, storage: Storage) -> ServerResult:
    """Train `job` with `group`, as the run called `name` in `storage`: all that is found but the bill."""
    with Renewal(storage, name) as renewal:
        return _trained(job, group, run, name, renewal)


def _trained(job: Job, group: TrainedWorkerGroup, run: ServerRun, name: str, renewal: Renewal) -> ServerResult:
    history, steps, began_s = History(), list[float](), time.monotonic()

    def watch(seen: object, done: float) -> None:
        renewal.renew_due(time.monotonic() - began_s)
        while len(steps) < len(history.losses):
            steps.append(time.monotonic() - began_s)
        del steps[len(history.losses) :]
        run.watch(group, done)

    config = LoopConfig(batches=job.batches, epochs=job.epochs, save_every=run.save_every, watch=watch)
    (train_synchronously if run.updates is Updates.BSP else train_asynchronously)(group, config, history)
    if run.save_every:
        group.save()
    ended_s = time.monotonic() - began_s
    ends = [*steps, *[ended_s] * (len(history.losses) - len(steps))]
    pushes = [replace(push, time_s=push.time_s - began_s) for push in history.pushes]
    mean = sum(push.samples for push in pushes) / max(len(pushes), 1)
    applied = 0
    for i, push in enumerate(pushes):
        applied += push.samples
        pushes[i] = replace(push, iterations=applied / mean)
    return ServerResult(
        run=name,
        updates=run.updates,
        seconds=ended_s,
        state=group.state_dict(),
        losses=tuple(history.losses),
        step_s=tuple(end - before for before, end in zip([0.0, *ends], ends, strict=False)),
        computed_by=tuple(history.computed_by),
        pushes=tuple(pushes),
        lost=tuple(history.lost),
        server_restarts=history.server_restarts,
    )
