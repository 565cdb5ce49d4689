"""The size of a job: epochs, steps, validations, and the requests and downloads of its client."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from funcpipe.client.prepare.data import open_data
from funcpipe.client.prepare.evaluation import as_validation
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.stages import PreparedStage
from funcpipe.core import FaultTolerance, Plan, Validation, checks
from funcpipe.model.split import StageModule
from funcpipe.runstate.owner import BEAT_S
from funcpipe.training.batches import Batches
from funcpipe.training.data_source import Data
from funcpipe.training.evaluation import evaluation_batches

_STEP_BYTES = 210
"""Bytes of the report of one replica's step."""

_BEAT_BYTES = 1_300
"""Bytes of one heartbeat."""

_WORKER_BYTES = 40_000
"""Bytes of a worker's records, its report, and the trace of its last steps, which is most of it."""


def request_counts(
    plan: Plan, faults: FaultTolerance, *, steps: int, step_s: float, total_s: float, files: int
) -> tuple[float, float, float]:
    """The puts, the gets, and the failed gets among these, to start a run, watch it, and collect its result.

    It does `steps` steps of `step_s` within `total_s`, and its last checkpoint has so many `files`.
    """
    stages = len(plan.stages)
    every_s = min(max(step_s / 2, 0.2 if step_s < 0.4 else 0.0), 5.0, faults.heartbeat_s)
    polls = min(steps * 2.5, total_s / max(every_s, 0.05))  # in vain
    beats = _beats(plan, faults, total_s)  # each is looked for by a list, and read
    owner = total_s / min(BEAT_S, faults.heartbeat_s)  # each time a put, and a list of all owners
    puts = 13 + 2 * plan.workers + 2 * stages + 2 * owner + (25 + plan.workers + beats + polls / 16)
    gets = steps * plan.replicas + polls + beats + 10 + 12 * plan.workers + stages + files
    return puts, gets, polls + 3.5 * plan.workers


def watched_bytes(plan: Plan, faults: FaultTolerance, *, steps: int, total_s: float) -> float:
    """Bytes that a client reads to watch `steps` steps within `total_s`: reports, heartbeats, traces."""
    beats = _beats(plan, faults, total_s)
    return steps * plan.replicas * _STEP_BYTES + beats * _BEAT_BYTES + plan.workers * _WORKER_BYTES


def _beats(plan: Plan, faults: FaultTolerance, total_s: float) -> float:
    return total_s / faults.heartbeat_s * plan.workers


def learned_bytes(plan: Plan, held_bytes: float, trained_bytes: float, *, averaged: bool, keeps_best: int = 0) -> float:
    """Bytes of the last checkpoint of all stages, and of the best models that are kept.

    A model of `held_bytes` is in both; what the optimiser keeps of `trained_bytes` of it, and their average, in the
    first. Replicas whose sums feed back save their residuals, too.
    """
    values = plan.optimizer.values_each(plan.replicas, sharded=False, averaged=averaged)
    if plan.feeds_back:
        values += plan.replicas * max(way.sync.fed_back(plan.replicas) for way in plan.ways)
    return held_bytes * (1 + keeps_best) + trained_bytes * values


def _model_bytes(module: nn.Module) -> tuple[int, int]:
    """The bytes of a module's parameters and buffers that checkpoints hold, and of those that are trained."""
    trained = sum(tensor.nbytes for tensor in module.parameters() if tensor.requires_grad)
    if isinstance(module, StageModule):
        fixed = module.fixed
        named = (*module.named_parameters(), *module.named_buffers())
        return sum(tensor.nbytes for name, tensor in named if name not in fixed), trained
    return trained + sum(tensor.nbytes for tensor in module.buffers()), trained


def collected_bytes(job: Job, stages: Sequence[PreparedStage]) -> float:
    """Bytes that a client reads when `job` has ended: what was learned, and the outputs of a model that predicts."""
    evaluation, found = job.evaluation, 0.0
    if job.epochs:
        sizes = [_model_bytes(stage.module) for stage in stages]
        keeps_best = 0 if evaluation is None else evaluation.monitor.keep_best
        held, trained = (sum(each) for each in zip(*sizes, strict=True))
        found = learned_bytes(job.plan, held, trained, averaged=job.recipe.average is not None, keeps_best=keeps_best)
    return found if evaluation is None else found + evaluation.samples * evaluation.output_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """The work to do: `steps` steps of `epochs` epochs are left, and `forward_steps` that validate.

    A forward-only step takes `forward_step_s`; None stands for the part of an iteration that its forwards take. With
    `averaged`, checkpoints hold an average of the parameters too. What the run has cost before is `earlier_usd`. At its
    end the client downloads `collected_bytes`; None stands for the last checkpoint, of what the plan trains.
    """

    epochs: int
    steps: int
    forward_steps: int = 0
    forward_step_s: float | None = None
    averaged: bool = False
    earlier_usd: float = 0.0
    collected_bytes: float | None = None


def job_shape(
    plan: Plan,
    data: int | Data,
    epochs: int,
    validation: Validation | Data | None = None,
    *,
    model: nn.Module | None = None,
    averaged: bool = False,
) -> JobShape:
    """The shape of a whole job on `data`, or on so many samples; raises DataError if they do not fill one batch."""
    checks.at_least("epochs", epochs, 1)
    samples, drop_last = (data, False) if isinstance(data, int) else _dealt(data)
    batches = Batches(
        samples=samples,
        drop_last=drop_last,
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        seed=0,
        shuffle=False,
    )
    steps, forward_steps, keeps_best = epochs * batches.steps_per_epoch, 0, 0
    if validation is not None:
        wanted = as_validation(validation)
        held_out = len(open_data(wanted.data)[1].dataset)
        each = evaluation_batches(held_out, plan).steps_per_epoch
        forward_steps = steps // wanted.interval(batches.steps_per_epoch) * each
        keeps_best = wanted.keep_best
    learned = None
    if model is not None:
        learned = learned_bytes(plan, *_model_bytes(model), averaged=averaged, keeps_best=keeps_best)
    return JobShape(epochs=epochs, steps=steps, forward_steps=forward_steps, averaged=averaged, collected_bytes=learned)


def _dealt(data: Data) -> tuple[int, bool]:
    """The number of samples of `data`, and whether a last batch that is not full is dropped."""
    _, source = open_data(data)
    return len(source.dataset), source.drop_last


def shape_left(job: Job, stages: Sequence[PreparedStage], *, done: int, earlier_usd: float) -> JobShape:
    """The shape of what is left of `job` when `done` steps are done, and have cost `earlier_usd`."""
    left, evaluation = max(job.steps - done, 0), job.evaluation
    return JobShape(
        epochs=math.ceil(left / job.batches.steps_per_epoch),
        steps=left,
        forward_steps=0 if evaluation is None else evaluation.steps_left(job.plan, done=done, steps=job.steps),
        averaged=job.recipe.average is not None,
        earlier_usd=earlier_usd,
        collected_bytes=collected_bytes(job, stages),
    )
