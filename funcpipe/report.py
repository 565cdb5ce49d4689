"""Predicted beside observed: two traces of one plan, compared stage by stage and lane by lane."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from funcpipe.core import Event, Resource, Trace
from funcpipe.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReport:
    """Seconds of one iteration on one lane of a stage's functions, at work and waiting; means over its replicas."""

    stage: int
    lane: Resource
    predicted_s: float
    observed_s: float
    observed_wait_s: float

    @property
    def ratio(self) -> float | None:
        """Observed over predicted; None where nothing was predicted."""
        return self.observed_s / self.predicted_s if self.predicted_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A comparison of one iteration as predicted with the median of those observed."""

    FORMAT: ClassVar[str] = "funcpipe.comparison/1"

    run: str
    steps: int
    predicted_iteration_s: float
    observed_iteration_s: float
    lanes: tuple[LaneReport, ...]

    @property
    def ratio(self) -> float | None:
        """Observed over predicted iteration time."""
        return self.observed_iteration_s / self.predicted_iteration_s if self.predicted_iteration_s else None


def compare(predicted: Trace, observed: Trace) -> Report:
    """Set `observed` beside `predicted`, one iteration each; shorter steps, as at an epoch's end, are left out.

    An observed iteration lasts from the end of one step to the end of the next. Raises PlanError when the traces are
    not of the same stages.
    """
    if not observed.events or not predicted.events:
        raise PlanError("there is nothing to compare: a trace without events")
    steps = _full_steps(observed)
    expected, found = _busy(predicted, predicted.steps()[:1]), _busy(observed, steps)
    if expected.keys() != found.keys():
        raise PlanError("the traces are not of the same plan: their stages or lanes differ")
    return Report(
        run=observed.run,
        steps=len(steps),
        predicted_iteration_s=predicted.duration_s,
        observed_iteration_s=_iteration_s(observed, steps),
        lanes=tuple(
            LaneReport(
                stage=stage,
                lane=lane,
                predicted_s=expected[stage, lane][0],
                observed_s=found[stage, lane][0],
                observed_wait_s=found[stage, lane][1],
            )
            for stage, lane in sorted(expected, key=lambda key: (key[0], list(Resource).index(key[1])))
        ),
    )


def _full_steps(trace: Trace) -> tuple[int, ...]:
    """The steps with the most tasks."""
    counts = Counter(event.step for event in trace.events)
    most = max(counts.values())
    return tuple(sorted(step for step, count in counts.items() if count == most))


def _iteration_s(trace: Trace, steps: tuple[int, ...]) -> float:
    """The median time between the ends of successive steps; the duration of the only one, if there is but one."""
    ends: dict[int, float] = defaultdict(float)
    for event in trace.events:
        ends[event.step] = max(ends[event.step], event.end_s)
    between = [ends[step] - ends[step - 1] for step in steps if step - 1 in ends]
    return median(between) if between else trace.of_step(steps[0]).duration_s


def _busy(trace: Trace, steps: tuple[int, ...]) -> Mapping[tuple[int, Resource], tuple[float, float]]:
    """Seconds at work and waiting by stage and lane: mean over replicas, median over `steps`."""
    events: dict[tuple[int, Resource], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    replicas: dict[int, set[int]] = defaultdict(set)
    for event in trace.events:
        replicas[event.stage].add(event.replica)
        if event.step in steps:
            events[event.stage, event.lane][event.step].append(event)
    return {
        (stage, lane): (
            median(sum(e.busy_s for e in found) for found in by_step.values()) / len(replicas[stage]),
            median(sum(e.waited_s for e in found) for found in by_step.values()) / len(replicas[stage]),
        )
        for (stage, lane), by_step in events.items()
    }
