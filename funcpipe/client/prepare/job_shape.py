"""The size of a job: epochs, steps, validations, and what a client downloads at its end."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from funcpipe.client.prepare.client_costs import collected_bytes, learned_bytes, model_bytes
from funcpipe.client.prepare.evaluation import as_validation
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.open_data import open_data
from funcpipe.client.prepare.stages import PreparedStage
from funcpipe.core import Plan, Validation, checks
from funcpipe.training.batches import Batches
from funcpipe.training.data_source import Data
from funcpipe.training.evaluation import evaluation_batches


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
    batches = Batches(
        samples=data if isinstance(data, int) else len(open_data(data)[1].dataset),
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        seed=0,
        shuffle=False,
    )
    steps, forward_steps, keeps_best = epochs * batches.steps_per_epoch, 0, False
    if validation is not None:
        wanted = as_validation(validation)
        held_out = len(open_data(wanted.data)[1].dataset)
        each = evaluation_batches(held_out, plan).steps_per_epoch
        forward_steps = steps // wanted.interval(batches.steps_per_epoch) * each
        keeps_best = wanted.keep_best
    learned = None
    if model is not None:
        learned = learned_bytes(plan, *model_bytes(model), averaged=averaged, keeps_best=keeps_best)
    return JobShape(epochs=epochs, steps=steps, forward_steps=forward_steps, averaged=averaged, collected_bytes=learned)


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
