"""What a run tells its client while it goes on, and what it leaves."""

from dataclasses import dataclass

from torch import Tensor

from funcpipe.client.supervisor import Supervisor
from funcpipe.core import Bill, Event, Events, Plan, PlatformSpec, Source, Trace, WorkerReport, prices_of
from funcpipe.errors import RunUnknown
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.documents import get_listed_document
from funcpipe.scheduler.simulator.clocks import aligned
from funcpipe.training.state import merge
from funcpipe.training.state_shards import whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come: `step` of `steps` has ended, with the mean `loss` over its samples.

    `cost_usd` is for the functions' time so far, and for as many requests as the plan expects.
    """

    step: int
    steps: int
    loss: float
    samples_per_s: float
    cost_usd: float


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run leaves: the mean loss of each step, the trained tensors under the model's names, what it took."""

    run: str
    losses: tuple[float, ...]
    tensors: dict[str, Tensor]
    trace: Trace
    bill: Bill
    workers: tuple[WorkerReport, ...]

    def state_dict(self) -> dict[str, Tensor]:
        """The trained model's parameters and buffers, for its `load_state_dict`."""
        return dict(self.tensors)


def collect(fleet: Supervisor, plan: Plan, prices: PlatformSpec, losses: tuple[float, ...]) -> RunResult:
    """What the run of `fleet` leaves, all workers having finished."""
    return RunResult(
        run=fleet.keys.run,
        losses=losses,
        tensors=_trained(fleet, len(plan.stages), len(losses)),
        trace=_trace(fleet, plan, prices),
        bill=fleet.bill(),
        workers=fleet.reports(),
    )


def _trained(fleet: Supervisor, stages: int, steps: int) -> dict[str, Tensor]:
    checkpoints = Checkpoints(fleet.storage, fleet.keys)
    listing = checkpoints.listing()
    names = [listing.names(stage, steps) for stage in range(stages)]
    if not all(names):
        raise RunUnknown(f"run {fleet.keys.run} has left no checkpoint after its last step, {steps}")
    return merge([whole(checkpoints.load_together(stage, own)) for stage, own in enumerate(names)]).state_dict()


def _trace(fleet: Supervisor, plan: Plan, prices: PlatformSpec) -> Trace:
    """The events of the last steps, by one clock that begins at second 0; of a step that was done again, the last."""
    newest: dict[tuple[int, int, int], tuple[int, list[Event]]] = {}
    for key in fleet.storage.list(fleet.keys.traces):
        for event in get_listed_document(fleet.storage, Events, key).events:
            place = (event.stage, event.replica, event.step)
            attempt, events = newest.setdefault(place, (event.attempt, []))
            if event.attempt > attempt:
                newest[place] = (event.attempt, [event])
            elif event.attempt == attempt:
                events.append(event)
    found = [event for _, events in newest.values() for event in events]
    return Trace(
        run=fleet.keys.run, source=Source.EXECUTED, events=aligned(found), prices=prices_of(plan, prices)
    ).from_zero()
