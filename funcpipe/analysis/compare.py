"""Traces in numbers: the use of functions' time stage by stage, and a predicted iteration beside observed ones."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from funcpipe.core import Bill, Event, FinishedRun, Resource, Trace, Use, stage_of
from funcpipe.core.trace import uses_of
from funcpipe.errors import PlanError

Seconds = Mapping[Use, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """Function-seconds of a stage by use, all replicas together; `usd` by use, None where prices are not known.

    Where `stage` is None, they are those of functions that left no report, of any stage.
    """

    stage: int | None
    seconds: Seconds
    usd: Mapping[Use, float] | None


def time_use(trace: Trace) -> tuple[StageUse, ...]:
    """Divide the time of the trace's steps among the uses, for each stage.

    A function counts in the steps of which its events are known.
    """
    windows, totals = trace.windows(), dict[int, dict[Use, float]]()
    of_function: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in trace.events:
        of_function[event.stage, event.replica].append(event)
    for (stage, _), own in sorted(of_function.items()):
        total = totals.setdefault(stage, dict.fromkeys(Use, 0.0))
        for events, begin_s, end_s in _stretches(own, windows):
            for use, seconds in uses_of(events, begin_s, end_s).items():
                total[use] += seconds
    prices = None if trace.prices is None else trace.prices.function_usd_s
    return tuple(
        StageUse(stage=stage, seconds=total, usd=None if prices is None else _priced(total, prices[stage]))
        for stage, total in totals.items()
    )


def account(finished: FinishedRun) -> tuple[StageUse, ...]:
    """Divide the lifetimes of all functions of a run among the uses: together they are the functions on its bill.

    Functions say themselves what their time went to; what the others were billed for is lost. Nothing for a run whose
    functions did not say so.
    """
    seconds: dict[int, dict[Use, float]] = {}
    usd: dict[int, dict[Use, float]] = {}
    for report in sorted(finished.workers, key=lambda report: report.worker):
        stage = stage_of(report.worker)
        own, own_usd = (kind.setdefault(stage, dict.fromkeys(Use, 0.0)) for kind in (seconds, usd))
        for name, value in report.uses.items():
            own[Use(name)] += value
            own_usd[Use(name)] += value * report.usd_s
    if not any(map(any, (own.values() for own in seconds.values()))):
        return ()
    stages = tuple(StageUse(stage=stage, seconds=own, usd=usd[stage]) for stage, own in sorted(seconds.items()))
    return (*stages, *_unreported(finished.bill, stages))


def _unreported(bill: Bill, stages: tuple[StageUse, ...]) -> Iterator[StageUse]:
    """The functions that are on the bill and in no report."""
    left_s = bill.function_seconds - sum(sum(stage.seconds.values()) for stage in stages)
    left_usd = bill.compute_usd - sum(sum((stage.usd or {}).values()) for stage in stages)
    if left_s > 1e-6 * bill.function_seconds:
        nothing = dict.fromkeys(Use, 0.0)
        yield StageUse(stage=None, seconds={**nothing, Use.LOST: left_s}, usd={**nothing, Use.LOST: max(left_usd, 0.0)})


def _stretches(
    events: list[Event], windows: Mapping[int, tuple[float, float]]
) -> Iterator[tuple[list[Event], float, float]]:
    """A function's events in steps that follow each other, with the begin of the first and the end of the last."""
    steps = {event.step for event in events}
    firsts = sorted(step for step in steps if step - 1 not in steps)
    for first, after in zip(firsts, (*firsts[1:], None), strict=True):
        own = [event for event in events if event.step >= first and (after is None or event.step < after)]
        yield own, windows[first][0], windows[max(event.step for event in own)][1]


def _priced(seconds: Seconds, price_usd_s: float) -> dict[Use, float]:
    return {use: value * price_usd_s for use, value in seconds.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneUse:
    """The use of one lane of a stage's functions in an iteration; means over the replicas.

    What it does at once counts once, as several transfers may be open. `idle_s` is the rest of the iteration, the
    bubbles. `usd` is what the lane costs for all replicas: the time of the functions, including `idle_usd` for bubbles,
    is charged to the compute lane, requests to the transfer lanes. Both are None if the trace has no prices.
    """

    busy_s: float
    wait_s: float
    idle_s: float
    usd: float | None
    idle_usd: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReport:
    """One lane of a stage, predicted and observed."""

    stage: int
    lane: Resource
    predicted: LaneUse
    observed: LaneUse

    @property
    def ratio(self) -> float | None:
        """Observed divided by predicted busy seconds; None if no work was predicted."""
        return self.observed.busy_s / self.predicted.busy_s if self.predicted.busy_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One predicted iteration compared with the median of `steps` observed ones."""

    FORMAT: ClassVar[str] = "funcpipe.comparison/1"

    run: str
    steps: int
    predicted_iteration_s: float
    observed_iteration_s: float
    lanes: tuple[LaneReport, ...]

    @property
    def ratio(self) -> float | None:
        """Observed divided by predicted iteration time; None if the prediction is 0."""
        return self.observed_iteration_s / self.predicted_iteration_s if self.predicted_iteration_s else None


def compare(predicted: Trace, observed: Trace) -> Report:
    """Compare one iteration; observed steps with fewer tasks, such as the last of an epoch, are left out.

    An observed iteration lasts from the end of one step to the end of the next. Raises PlanError if a trace is empty or
    their stages or lanes differ.
    """
    if not observed.events or not predicted.events:
        raise PlanError("there is nothing to compare: a trace has no events")
    steps = full_steps(observed)
    observed_s = _iteration_s(observed, steps)
    expected = _use(predicted, predicted.steps()[:1], predicted.duration_s)
    found = _use(observed, steps, observed_s)
    unmeasured = {lane for lane in found if lane[1] is Resource.LOAD} - expected.keys()
    expected = {**expected, **dict.fromkeys(unmeasured, _nothing(predicted))}
    if expected.keys() != found.keys():
        raise PlanError("the traces are not of the same plan: their stages or lanes differ")
    return Report(
        run=observed.run,
        steps=len(steps),
        predicted_iteration_s=predicted.duration_s,
        observed_iteration_s=observed_s,
        lanes=tuple(
            LaneReport(stage=stage, lane=lane, predicted=expected[stage, lane], observed=found[stage, lane])
            for stage, lane in sorted(expected, key=lambda key: (key[0], list(Resource).index(key[1])))
        ),
    )


def typical_step(observed: Trace) -> Trace:
    """The step with the median duration among those with the most tasks, shifted to start at 0 s."""
    steps = [observed.of_step(step) for step in full_steps(observed)]
    return sorted(steps, key=lambda step: step.duration_s)[len(steps) // 2].from_zero()


def typical_iteration_s(observed: Trace) -> float:
    """The median time of an observed iteration, from the end of one step to the end of the next."""
    return _iteration_s(observed, full_steps(observed))


def full_steps(trace: Trace) -> tuple[int, ...]:
    """The steps with the most tasks; loads do not count, as the first and the last step have others."""
    counts = Counter(event.step for event in trace.events if event.lane is not Resource.LOAD)
    most = max(counts.values())
    return tuple(sorted(step for step, count in counts.items() if count == most))


def _iteration_s(trace: Trace, steps: tuple[int, ...]) -> float:
    """The median time between the ends of successive steps; the duration of the first if none succeed each other."""
    ends: dict[int, float] = defaultdict(float)
    for event in trace.events:
        ends[event.step] = max(ends[event.step], event.end_s)
    between = [ends[step] - ends[step - 1] for step in steps if step - 1 in ends]
    return median(between) if between else trace.of_step(steps[0]).duration_s


def _use(trace: Trace, steps: tuple[int, ...], iteration_s: float) -> Mapping[tuple[int, Resource], LaneUse]:
    """The use of each lane by each stage: mean over replicas, median over `steps`."""
    events: dict[tuple[int, Resource], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    replicas: dict[int, set[int]] = defaultdict(set)
    for event in trace.events:
        replicas[event.stage].add(event.replica)
        if event.step in steps:
            events[event.stage, event.lane][event.step].append(event)
    return {
        (stage, lane): _lane_use(list(by_step.values()), iteration_s, len(replicas[stage]), _tariff(trace, stage, lane))
        for (stage, lane), by_step in events.items()
    }


def _nothing(predicted: Trace) -> LaneUse:
    """The use of a lane that the profile knows nothing of, as loading is not always measured."""
    no_usd = None if predicted.prices is None else 0.0
    return LaneUse(busy_s=0.0, wait_s=0.0, idle_s=predicted.duration_s, usd=no_usd, idle_usd=no_usd)


def _tariff(trace: Trace, stage: int, lane: Resource) -> tuple[float, Callable[[Event], float]] | None:
    """Dollars per second of a lane, and for each of its transfers; None if the trace has no prices."""
    if trace.prices is None:
        return None
    second_usd = trace.prices.function_usd_s[stage] if lane is Resource.COMPUTE else 0.0
    return second_usd, trace.prices.transfer_usd


def _spans(events: list[Event]) -> tuple[float, float]:
    """The seconds in which a lane worked, and those in which it only waited, of all replicas in a step.

    Several transfers may be open at once.
    """
    busy_s, wait_s = 0.0, 0.0
    for replica in {event.replica for event in events}:
        own = [event for event in events if event.replica == replica]
        begin_s, end_s = min(event.start_s for event in own), max(event.end_s for event in own)
        uses = uses_of(own, begin_s, end_s)
        wait_s += uses[Use.WAIT]
        busy_s += end_s - begin_s - uses[Use.WAIT] - uses[Use.BUBBLE]
    return busy_s, wait_s


def _lane_use(
    steps: list[list[Event]],
    iteration_s: float,
    replicas: int,
    tariff: tuple[float, Callable[[Event], float]] | None,
) -> LaneUse:
    spans = [_spans(events) for events in steps]
    busy_s = median(busy for busy, _ in spans) / replicas
    wait_s = median(wait for _, wait in spans) / replicas
    idle_s = max(0.0, iteration_s - busy_s - wait_s)
    if tariff is None:
        return LaneUse(busy_s=busy_s, wait_s=wait_s, idle_s=idle_s, usd=None, idle_usd=None)
    second_usd, transfer_usd = tariff
    return LaneUse(
        busy_s=busy_s,
        wait_s=wait_s,
        idle_s=idle_s,
        usd=second_usd * replicas * iteration_s + median(sum(map(transfer_usd, events)) for events in steps),
        idle_usd=second_usd * replicas * idle_s,
    )
