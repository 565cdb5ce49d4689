"""Going on with a run, under the same or another plan: from the newest step that all its stages have saved."""

from dataclasses import dataclass

from funcpipe.core import Heartbeat, RunRecord, StepReport
from funcpipe.errors import KeyMissing
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.documents import get_document, get_listed_document
from funcpipe.runstate.keys import Keys
from funcpipe.training.state import StageState, merge_stages
from funcpipe.training.state_shards import unshard


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run is taken up: what the whole model had learned after `step` steps, and what these took.

    `state` is None if nothing was saved, so that it begins anew.
    """

    keys: Keys
    step: int
    state: StageState | None
    losses: tuple[float, ...]
    spent_usd: float
    elapsed_s: float


def recover(storage: Storage, record: RunRecord) -> Resumed:
    """What can be gone on with."""
    keys = Keys(record.run, record.generation)
    checkpoints = Checkpoints(storage, keys, first_step=record.first_step)
    listing = checkpoints.listing()
    stages = len(record.plan.stages)
    step = listing.common(stages, record.plan.replicas)
    names = [listing.names(stage, step) for stage in range(stages)]
    state = None
    if all(names):
        state = merge_stages([unshard(checkpoints.load_together(stage, own)) for stage, own in enumerate(names)])
    beats = [beat for beat in heartbeats(storage, record) if beat is not None]
    return Resumed(
        keys=keys,
        step=step,
        state=state,
        losses=_losses(storage, record, step),
        spent_usd=max([beat.run_usd for beat in beats], default=record.spent_usd),
        elapsed_s=max([beat.run_s for beat in beats], default=record.elapsed_s),
    )


def heartbeats(storage: Storage, record: RunRecord) -> list[Heartbeat | None]:
    """The last heartbeat of each worker, stage by stage."""
    keys = Keys(record.run, record.generation)
    found: list[Heartbeat | None] = []
    for stage in range(len(record.plan.stages)):
        for replica in range(record.plan.replicas):
            try:
                found.append(get_document(storage, Heartbeat, keys.heartbeat(f"s{stage}.r{replica}")))
            except KeyMissing:
                found.append(None)
    return found


def _losses(storage: Storage, record: RunRecord, step: int) -> tuple[float, ...]:
    """The mean loss of each of the first `step` steps."""
    keys, last = Keys(record.run, record.generation), len(record.plan.stages) - 1
    losses = list(record.losses[:step])
    for number in range(len(losses), step):
        reports = [
            get_listed_document(storage, StepReport, keys.step_report(number, f"s{last}.r{replica}"))
            for replica in range(record.plan.replicas)
        ]
        losses.append(sum(r.loss_sum for r in reports) / sum(r.samples for r in reports))
    return tuple(losses)
