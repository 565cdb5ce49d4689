"""What a run tells its client while it goes on, and what it leaves: read from storage here, and nowhere else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from funcpipe.client.functions import WatchedFunction, unwatched_functions
from funcpipe.core import (
    Bill,
    Event,
    Events,
    Plan,
    PlatformSpec,
    RequestCounts,
    Source,
    Trace,
    WorkerReport,
    prices_of,
)
from funcpipe.errors import RunUnknown
from funcpipe.model.split.module_state import Attributes
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.documents import readable_documents
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.spending import request_usd, told_requests, worker_reports
from funcpipe.scheduler.simulator.clocks import aligned
from funcpipe.training.state import StageState, merge_stages
from funcpipe.training.state_shards import unshard


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come: `step` of `steps` has ended, with the mean `loss` over its samples.

    `samples_per_s` is what this client has seen since the first step that it waited for. `cost_usd` is what the run has
    cost since it was first started: its functions' time, their requests as far as they have told, and this client's.
    `elapsed_s` is how long it has taken.
    """

    step: int
    steps: int
    loss: float
    samples_per_s: float
    cost_usd: float
    elapsed_s: float = 0.0


OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """Do nothing when a step has ended."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run leaves: the mean loss of each step, the trained tensors under the model's names, what it took.

    `attributes` are the Python attributes that forwards of the model change for the next ones, by module and name.
    """

    run: str
    losses: tuple[float, ...]
    tensors: dict[str, Tensor]
    trace: Trace
    bill: Bill
    workers: tuple[WorkerReport, ...]
    attributes: Attributes = field(default_factory=dict)

    def state_dict(self) -> dict[str, Tensor]:
        """The trained model's parameters and buffers, for its `load_state_dict`."""
        return dict(self.tensors)


def collect(
    storage: Storage,
    keys: Keys,
    plan: Plan,
    prices: PlatformSpec,
    *,
    losses: tuple[float, ...],
    watched: Sequence[WatchedFunction] = (),
    trained: StageState | None = None,
    earlier_usd: float,
) -> RunResult:
    """What a run leaves whose workers have all finished. `earlier_usd` is what it had cost before it was resumed.

    The bill counts all functions of the run, those too that this client has not `watched`, but not this client's own
    requests, which are not over yet (`with_client`). What was learned is read from storage unless it is `trained`.
    """
    reports = worker_reports(storage, keys)
    functions = [*watched, *unwatched_functions(storage, keys, watched)]
    trained = trained or _trained(storage, keys, len(plan.stages), len(losses))
    return RunResult(
        run=keys.run,
        losses=losses,
        tensors=trained.state_dict(),
        trace=_trace(storage, keys, plan, prices),
        bill=bill(functions, reports, told_requests(storage, keys, reports), prices, earlier_usd=earlier_usd),
        workers=reports,
        attributes=trained.attributes(),
    )


def bill(
    functions: Sequence[WatchedFunction],
    reports: Sequence[WorkerReport],
    requests: RequestCounts,
    prices: PlatformSpec,
    *,
    earlier_usd: float,
) -> Bill:
    """What functions that have all ended took, and what their `requests` cost.

    A function that has left a report says itself how long it ran. Of several functions that were started as one
    attempt, the report is the last one's.
    """
    alive_s = {(report.worker, report.attempt): report.alive_s for report in reports}
    in_order = sorted(functions, key=lambda function: function.started.started_at_s)
    last = {(function.started.worker, function.started.attempt): function for function in in_order}

    def seconds_of(function: WatchedFunction) -> float:
        attempt = function.started.worker, function.started.attempt
        return (alive_s.get(attempt) if last[attempt] is function else None) or function.seconds()

    seconds = [seconds_of(function) for function in functions]
    return Bill(
        platform=prices.name,
        functions=len(functions),
        function_seconds=sum(seconds),
        puts=requests.puts,
        lists=requests.lists,
        gets=requests.gets,
        compute_usd=sum(s * function.started.usd_s for s, function in zip(seconds, functions, strict=True)),
        request_usd=request_usd(requests, prices, functions=len(functions)),
        earlier_usd=earlier_usd,
    )


def with_client(made: Bill, client: RequestCounts, prices: PlatformSpec) -> Bill:
    """The bill `made` for functions, with what this client has asked of the storage."""
    return replace(
        made,
        puts=made.puts + client.puts,
        lists=made.lists + client.lists,
        gets=made.gets + client.gets,
        request_usd=made.request_usd + prices.counted_usd(client),
        client=client,
    )


def _trained(storage: Storage, keys: Keys, stages: int, steps: int) -> StageState:
    checkpoints = Checkpoints(storage, keys)
    listing = checkpoints.index()
    names = [listing.manifests(stage, steps) for stage in range(stages)]
    if not all(names):
        raise RunUnknown(f"run {keys.run} has left no checkpoint after its last step, {steps}")
    return merge_stages([unshard(checkpoints.load_combined(stage, own)) for stage, own in enumerate(names)])


def _trace(storage: Storage, keys: Keys, plan: Plan, prices: PlatformSpec) -> Trace:
    """The events of the last steps, by one clock that begins at second 0; of a step that was done again, the last."""
    newest: dict[tuple[int, int, int], tuple[int, list[Event]]] = {}
    for document in readable_documents(storage, Events, storage.list(keys.traces)):
        for event in document.events:
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
