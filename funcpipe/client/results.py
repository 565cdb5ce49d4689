"""What a run tells its client while it goes on, and what it leaves: read from storage here, and nowhere else."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from funcpipe.client.failures import worker_reports
from funcpipe.client.functions import WatchedFunction
from funcpipe.core import Bill, Event, Events, Plan, PlatformSpec, Source, StepReport, Trace, WorkerReport, prices_of
from funcpipe.errors import KeyMissing, RunUnknown
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.documents import get_document, get_listed_document
from funcpipe.runstate.keys import Keys
from funcpipe.scheduler.simulator.clocks import aligned
from funcpipe.training.state import merge_stages
from funcpipe.training.state_shards import unshard


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come: `step` of `steps` has ended, with the mean `loss` over its samples.

    `samples_per_s` is what this client has seen since the first step that it waited for. `cost_usd` is what the run has
    cost since it was first started: its functions' time, and as many requests as the plan expects. `elapsed_s` is how
    long it has taken.
    """

    step: int
    steps: int
    loss: float
    samples_per_s: float
    cost_usd: float
    elapsed_s: float = 0.0


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


def step_report(storage: Storage, keys: Keys, step: int, worker: str) -> StepReport | None:
    """What `worker` has reported of `step`, once it has ended the step."""
    try:
        return get_document(storage, StepReport, keys.step_report(step, worker))
    except KeyMissing:
        return None


def collect(
    storage: Storage,
    keys: Keys,
    plan: Plan,
    prices: PlatformSpec,
    *,
    losses: tuple[float, ...],
    functions: Sequence[WatchedFunction],
    earlier_usd: float,
) -> RunResult:
    """What a run leaves whose workers have all finished. `earlier_usd` is what it had cost before it was resumed."""
    reports = worker_reports(storage, keys)
    return RunResult(
        run=keys.run,
        losses=losses,
        tensors=_trained(storage, keys, len(plan.stages), len(losses)),
        trace=_trace(storage, keys, plan, prices),
        bill=bill(functions, reports, prices, earlier_usd=earlier_usd),
        workers=reports,
    )


def bill(
    functions: Sequence[WatchedFunction], reports: Sequence[WorkerReport], prices: PlatformSpec, *, earlier_usd: float
) -> Bill:
    """What functions that have all ended took.

    A function that other functions started knows better than this client how long it ran. The requests of those that
    died without a report are not known.
    """
    alive_s = {(report.worker, report.attempt): report.alive_s for report in reports}
    seconds = [max(f.seconds(), alive_s.get((f.started.worker, f.started.attempt), 0.0)) for f in functions]
    puts, gets = sum(report.puts for report in reports), sum(report.gets for report in reports)
    request_usd = puts * prices.price_put_usd + gets * prices.price_get_usd
    return Bill(
        platform=prices.name,
        functions=len(functions),
        function_seconds=sum(seconds),
        puts=puts,
        gets=gets,
        compute_usd=sum(s * function.started.usd_s for s, function in zip(seconds, functions, strict=True)),
        request_usd=request_usd + len(functions) * prices.price_invocation_usd,
        earlier_usd=earlier_usd,
    )


def _trained(storage: Storage, keys: Keys, stages: int, steps: int) -> dict[str, Tensor]:
    checkpoints = Checkpoints(storage, keys)
    listing = checkpoints.index()
    names = [listing.manifests(stage, steps) for stage in range(stages)]
    if not all(names):
        raise RunUnknown(f"run {keys.run} has left no checkpoint after its last step, {steps}")
    return merge_stages(
        [unshard(checkpoints.load_combined(stage, own)) for stage, own in enumerate(names)]
    ).state_dict()


def _trace(storage: Storage, keys: Keys, plan: Plan, prices: PlatformSpec) -> Trace:
    """The events of the last steps, by one clock that begins at second 0; of a step that was done again, the last."""
    newest: dict[tuple[int, int, int], tuple[int, list[Event]]] = {}
    for key in storage.list(keys.traces):
        for event in get_listed_document(storage, Events, key).events:
            place = (event.stage, event.replica, event.step)
            attempt, events = newest.setdefault(place, (event.attempt, []))
            if event.attempt > attempt:
                newest[place] = (event.attempt, [event])
            elif event.attempt == attempt:
                events.append(event)
    found = [event for _, events in newest.values() for event in events]
    return Trace(
        run=keys.run, source=Source.EXECUTED, events=aligned(found), prices=prices_of(plan, prices)
    ).from_zero()
