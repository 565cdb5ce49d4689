"""The events on every lane, observed or predicted, in a file that Perfetto opens, and what each second went to."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from funcpipe.core import checks, json_form
from funcpipe.core.plan import Plan
from funcpipe.core.platform import PlatformSpec
from funcpipe.core.stores import RequestCounts, StoreSpec, kind_moved
from funcpipe.core.texts import Described
from funcpipe.errors import FormatError, InvalidValue

TRACE_FORMAT = "funcpipe.trace/1"
_HEAD = ("run", "source", "prices", "samples")


class Resource(Enum):
    """The resource that a lane of a function occupies."""

    COMPUTE = "compute"
    UPLOAD = "upload"
    DOWNLOAD = "download"
    MERGE = "merge"
    LOAD = "load"
    TO_HOST = "to-host"
    TO_DEVICE = "to-device"

    __hash__ = object.__hash__  # as in `scheduler.tasks.Kind`: large graphs look lanes up for every task


class Source(Enum):
    """The origin of a trace: a virtual clock or real functions."""

    SIMULATED = "simulated"
    EXECUTED = "executed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One task on one lane of one worker, in seconds since the trace began.

    `waited_s`, part of the duration, is the time before the awaited object existed. `attempt` counts how often the
    worker had died and started again before.
    """

    task: str
    stage: int
    replica: int
    lane: Resource
    step: int
    start_s: float
    end_s: float
    payload_bytes: int = 0
    waited_s: float = 0.0
    attempt: int = 0

    def __post_init__(self) -> None:
        if not self.end_s >= self.start_s:
            raise InvalidValue("end_s", self.end_s, f"must not lie before start_s={self.start_s}")
        checks.at_least("payload_bytes", self.payload_bytes, 0)
        checks.at_least("waited_s", self.waited_s, 0)

    @property
    def busy_s(self) -> float:
        """The seconds in which the lane worked rather than waited."""
        return self.end_s - self.start_s - self.waited_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """The events of an attempt's last steps, and how many `samples` all replicas together had in each of these."""

    FORMAT: ClassVar[str] = "funcpipe.events/1"

    events: tuple[Event, ...]
    samples: Mapping[int, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The price of a second of each stage's functions, and of each request to the default store.

    `stores` are the stores, by kind, of messages and of sums that are not in the default one.
    """

    function_usd_s: tuple[float, ...]
    put_usd: float
    get_usd: float
    stores: Mapping[str, StoreSpec] = field(default_factory=dict, hash=False)

    def transfer_usd(self, event: Event) -> float:
        """Return dollars for the request of `event` and for its bytes; 0 for one that transfers nothing."""
        store = self.stores.get(kind_moved(event.task))
        if event.lane is Resource.UPLOAD:
            counts = RequestCounts(puts=1, sent_bytes=event.payload_bytes)
            return self.put_usd if store is None else store.counted_usd(counts)
        if event.lane is Resource.DOWNLOAD:
            counts = RequestCounts(gets=1, received_bytes=event.payload_bytes)
            return self.get_usd if store is None else store.counted_usd(counts)
        return 0.0


def prices_of(plan: Plan, spec: PlatformSpec) -> Prices:
    """Return the prices of `plan`'s functions and requests on `spec`; raises InvalidValue if it lacks size or store."""
    return Prices(
        function_usd_s=tuple(spec.size(stage.size).price_usd_s for stage in plan.stages),
        put_usd=spec.price_put_usd,
        get_usd=spec.price_get_usd,
        stores=spec.other_stores(plan.stores),
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trace(Described):
    """The events of a run, in order of their start.

    Of a run that was executed they are those of each function's last steps, so that steps between them may be missing.
    `samples` is how many a step had, where that is known.
    """

    run: str
    source: Source
    events: tuple[Event, ...]
    prices: Prices | None = None
    samples: Mapping[int, int] = field(default_factory=dict, hash=False)

    @property
    def duration_s(self) -> float:
        """From the first start to the last end."""
        if not self.events:
            return 0.0
        return max(event.end_s for event in self.events) - min(event.start_s for event in self.events)

    @property
    def end_s(self) -> float:
        """The end of the last event; a simulated step begins at second 0, cold starts included."""
        return max((event.end_s for event in self.events), default=0.0)

    @property
    def steps_s(self) -> float:
        """The seconds of the steps that have events, without what lies between steps that do not follow each other."""
        return sum(end_s - begin_s for begin_s, end_s in self.windows().values())

    def steps(self) -> tuple[int, ...]:
        """Return the steps that have events, in ascending order."""
        return tuple(sorted({event.step for event in self.events}))

    def windows(self) -> dict[int, tuple[float, float]]:
        """Return each step's begin and end: where the step before it is known, it began as that ended."""
        begun: dict[int, float] = {}
        ended: dict[int, float] = {}
        for event in self.events:
            begun[event.step] = min(begun.get(event.step, event.start_s), event.start_s)
            ended[event.step] = max(ended.get(event.step, event.end_s), event.end_s)
        found: dict[int, tuple[float, float]] = {}
        for step in sorted(ended):
            begin_s = found[step - 1][1] if step - 1 in found else begun[step]
            found[step] = begin_s, max(ended[step], begin_s)
        return found

    def of_step(self, step: int) -> "Trace":
        """Return the events of one step alone."""
        return replace(self, events=tuple(event for event in self.events if event.step == step))

    def from_zero(self) -> "Trace":
        """Return the same events, shifted to begin at second 0."""
        origin_s = min((event.start_s for event in self.events), default=0.0)
        moved = (replace(e, start_s=e.start_s - origin_s, end_s=e.end_s - origin_s) for e in self.events)
        return replace(self, events=tuple(moved))


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write `trace` in the Chrome trace event form: a process for each worker, a thread for each lane."""
    head = json_form.to_plain(replace(trace, events=()))
    document = {"format": TRACE_FORMAT, **head, "traceEvents": _entries(trace, first=1)}
    Path(path).write_text(json.dumps(document), encoding="utf-8")


def write_side_by_side(predicted: Trace, observed: Trace, path: str | Path) -> None:
    """Write both for Perfetto, each from second 0, the observed workers below the predicted ones."""
    first = 1 + len({(event.stage, event.replica) for event in predicted.events})
    entries = _entries(predicted.from_zero(), first=1, prefix="predicted: ")
    entries += _entries(observed.from_zero(), first=first, prefix="observed: ")
    Path(path).write_text(json.dumps({"traceEvents": entries}), encoding="utf-8")


def read_trace(path: str | Path) -> Trace:
    """Read what `write_trace` wrote."""
    source = str(path)
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{source}: cannot be read: {error}") from error
    json_form.check_format(document.get("format") if isinstance(document, dict) else None, TRACE_FORMAT, source)
    entries = document.get("traceEvents")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise FormatError(f"{source}: field 'traceEvents' must be an array of objects")
    events = tuple(
        json_form.from_plain(Event, entry.get("args"), source=source, field=f"traceEvents[{i}].args")
        for i, entry in enumerate(entries)
        if entry.get("ph") == "X"
    )
    head: Mapping[str, Any] = {name: document.get(name) for name in _HEAD if name in document}
    named: Trace = json_form.from_plain(Trace, {**head, "events": []}, source=source)
    return replace(named, events=events)


def _entries(trace: Trace, *, first: int, prefix: str = "") -> list[dict[str, Any]]:
    """Events, and the names of processes, numbered from `first`, and of their threads."""
    workers = sorted({(event.stage, event.replica) for event in trace.events})
    numbers = {worker: number for number, worker in enumerate(workers, start=first)}
    entries = [_name("process_name", number, 0, f"{prefix}stage {s} replica {r}") for (s, r), number in numbers.items()]
    entries += [
        _name("thread_name", number, thread, resource.value)
        for number in numbers.values()
        for thread, resource in enumerate(Resource)
    ]
    return entries + [_entry(event, numbers[event.stage, event.replica]) for event in trace.events]


def _entry(event: Event, process: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": event.task,
        "cat": event.lane.value,
        "pid": process,
        "tid": list(Resource).index(event.lane),
        "ts": event.start_s * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "args": json_form.to_plain(event),
    }


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


class Use(Enum):
    """The activity of a function at a moment. Where several lanes work at once, the first of these counts.

    Lanes do nothing in a *bubble*. What follows it is not part of a step that ended: validations; saving, with all else
    between steps and after the last, such as handing over; starting, up to the first step; and steps that did not end.
    """

    COMPUTE = "compute"
    SYNC = "synchronisation"
    TRANSFER = "transfer"
    LOAD = "loading"
    WAIT = "wait"
    BUBBLE = "bubble"
    VALIDATION = "validation"
    SAVE = "saving"
    START = "start"
    LOST = "lost"


_LANES = (Use.COMPUTE, Use.SYNC, Use.TRANSFER, Use.LOAD, Use.WAIT)
IN_STEPS = (*_LANES, Use.BUBBLE)
"""The activities within steps."""

_WAIT = _LANES.index(Use.WAIT)
_SYNC = ("split", "merge", "flatten", "tied", "norm")


def uses_of(events: Sequence[Event], begin_s: float, end_s: float) -> dict[Use, float]:
    """Return the seconds from `begin_s` to `end_s` by the activity of the function to which `events` belong.

    A lane *waits* where an object did not exist yet. Transfers that overlap computing cost no time: they are compute.
    """
    changes: list[tuple[float, int, int]] = []
    for event in events:
        begun_s = max(event.start_s + event.waited_s, begin_s)
        until_s = min(event.end_s, end_s)
        if event.waited_s and (wait_end_s := min(begun_s, until_s)) > (wait_s := max(event.start_s, begin_s)):
            changes += ((wait_s, 1, _WAIT), (wait_end_s, -1, _WAIT))
        if until_s > begun_s:
            number = _number_of(event.task.partition(".")[0], event.lane)
            changes += ((begun_s, 1, number), (until_s, -1, number))
    changes.sort()
    running, found, now_s = [0] * len(_LANES), [0.0] * len(IN_STEPS), begin_s
    current = idle = len(_LANES)
    for at_s, change, number in changes:
        found[current] += at_s - now_s
        now_s = at_s
        running[number] += change
        if number <= current:
            current = next((i for i in range(number, idle) if running[i]), idle)
    found[idle] += end_s - now_s
    return dict(zip(IN_STEPS, found, strict=True))


@functools.cache
def _number_of(kind: str, lane: Resource) -> int:
    """Return the index in `_LANES` of tasks of a kind."""
    if lane is Resource.LOAD:
        return _LANES.index(Use.LOAD)
    if lane is Resource.MERGE or any(word in kind for word in _SYNC):
        return _LANES.index(Use.SYNC)
    return _LANES.index(Use.COMPUTE if lane is Resource.COMPUTE else Use.TRANSFER)
