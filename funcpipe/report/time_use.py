"""Where the time of functions went: every second of each function in exactly one class."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from funcpipe.core import Event, Resource, Trace, WorkerReport, worker_name
from funcpipe.report.gantt import letter


class Use(Enum):
    """What a function does at a moment. Where several lanes work at once, the first of these counts."""

    COMPUTE = "compute"
    SYNC = "synchronisation"
    TRANSFER = "transfer"
    LOAD = "loading"
    WAIT = "wait"
    BUBBLE = "bubble"
    START = "start"


_ORDER = tuple(Use)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """Function-seconds of a stage by use, all replicas together; `usd` by use, None where prices are not known."""

    stage: int
    seconds: Mapping[Use, float]
    usd: Mapping[Use, float] | None


def time_use(trace: Trace, workers: tuple[WorkerReport, ...] = ()) -> tuple[StageUse, ...]:
    """Divide the time from the trace's first event to its last among the uses, for each stage.

    Overlapped transfers cost no time, so they count as compute. A lane *waits* where an object did not exist yet; in a
    *bubble* no lane does anything. With `workers`, what their functions lived beyond the trace counts as start.
    """
    if not trace.events:
        return ()
    begin_s, end_s = min(event.start_s for event in trace.events), trace.end_s
    events: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in trace.events:
        events[event.stage, event.replica].append(event)
    alive_s: dict[str, float] = defaultdict(float)
    for report in workers:
        alive_s[report.worker] += report.alive_s
    totals: dict[int, dict[Use, float]] = {}
    for (stage, replica), own in sorted(events.items()):
        total = totals.setdefault(stage, dict.fromkeys(Use, 0.0))
        for use, seconds in _one_function(own, begin_s, end_s).items():
            total[use] += seconds
        total[Use.START] += max(0.0, alive_s[worker_name(stage, replica)] - (end_s - begin_s))
    return tuple(StageUse(stage=stage, seconds=total, usd=_usd(trace, stage, total)) for stage, total in totals.items())


def _usd(trace: Trace, stage: int, seconds: Mapping[Use, float]) -> Mapping[Use, float] | None:
    if trace.prices is None:
        return None
    price_usd_s = trace.prices.function_usd_s[stage]
    return {use: value * price_usd_s for use, value in seconds.items()}


def _one_function(events: list[Event], begin_s: float, end_s: float) -> dict[Use, float]:
    """Sweep over the points at which something begins or ends, counting what is under way."""
    changes: list[tuple[float, int, Use]] = []
    for event in events:
        begun_s = event.start_s + event.waited_s
        changes += [(event.start_s, 1, Use.WAIT), (begun_s, -1, Use.WAIT)]
        changes += [(begun_s, 1, _use_of(event)), (event.end_s, -1, _use_of(event))]
    running, found, now_s = dict.fromkeys(Use, 0), dict.fromkeys(Use, 0.0), begin_s
    for at_s, change, use in sorted(changes, key=lambda item: item[0]):
        current = next((kind for kind in _ORDER if running[kind]), Use.BUBBLE)
        found[current] += at_s - now_s
        now_s = at_s
        running[use] += change
    found[Use.BUBBLE] += end_s - now_s
    return found


def _use_of(event: Event) -> Use:
    if event.lane is Resource.LOAD:
        return Use.LOAD
    if letter(event.task) in "sn" or event.lane is Resource.MERGE:
        return Use.SYNC
    return Use.TRANSFER if event.lane in (Resource.UPLOAD, Resource.DOWNLOAD) else Use.COMPUTE
