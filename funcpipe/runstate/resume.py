"""Where a run can be resumed, under the same or another plan: the newest step that all its stages have saved."""

import logging
from dataclasses import dataclass

from funcpipe.core import Heartbeat, RunRecord, StepReport, worker_name
from funcpipe.errors import KeyMissing
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.documents import get_document, get_listed_document
from funcpipe.runstate.keys import Keys
from funcpipe.training.state import StageState, merge_stages
from funcpipe.training.state_shards import unshard

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """What the whole model had learned after `step` steps, the loss of each, and their cost in money and time.

    `state` is None if nothing was saved, so that training starts from the beginning.
    """

    keys: Keys
    step: int
    state: StageState | None
    losses: tuple[float, ...]
    spent_usd: float
    elapsed_s: float


def load_resume_point(storage: Storage, record: RunRecord) -> ResumePoint:
    """The newest point at which the run can be resumed, with its state."""
    keys = Keys(record.run, record.generation)
    checkpoints = Checkpoints(storage, keys, first_step=record.first_step)
    index = checkpoints.index()
    stages = range(len(record.plan.stages))
    step = index.common_step(len(stages), record.plan.replicas)
    manifests = [index.manifests(stage, step) for stage in stages]
    state = None
    if all(manifests):
        state = merge_stages([unshard(checkpoints.load_combined(stage, manifests[stage])) for stage in stages])
    _log.info("%s can be resumed after step %d%s", keys.prefix, step, "" if state is not None else ": nothing is saved")
    beats = [beat for beat in read_heartbeats(storage, record) if beat is not None]
    return ResumePoint(
        keys=keys,
        step=step,
        state=state,
        losses=_losses(storage, record, step),
        spent_usd=max([beat.run_usd for beat in beats], default=record.spent_usd),
        elapsed_s=max([beat.run_s for beat in beats], default=record.elapsed_s),
    )


def read_heartbeats(storage: Storage, record: RunRecord) -> list[Heartbeat | None]:
    """The last heartbeat of each worker, in order of stages and replicas; None for a worker that has sent none."""
    keys = Keys(record.run, record.generation)
    found: list[Heartbeat | None] = []
    for stage in range(len(record.plan.stages)):
        for replica in range(record.plan.replicas):
            try:
                found.append(get_document(storage, Heartbeat, keys.heartbeat(worker_name(stage, replica))))
            except KeyMissing:
                found.append(None)
    return found


def _losses(storage: Storage, record: RunRecord, step: int) -> tuple[float, ...]:
    """The mean loss of each of the first `step` steps."""
    keys, last = Keys(record.run, record.generation), len(record.plan.stages) - 1
    losses = list(record.losses[:step])
    for number in range(len(losses), step):
        reports = [
            get_listed_document(storage, StepReport, keys.step_report(number, worker_name(last, replica)))
            for replica in range(record.plan.replicas)
        ]
        losses.append(sum(r.loss_sum for r in reports) / sum(r.samples for r in reports))
    return tuple(losses)
