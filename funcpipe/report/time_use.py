"""The use of functions' time, stage by stage: in the steps of a trace, or in the whole run."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from funcpipe.core import Bill, Event, FinishedRun, Trace, Use, stage_of
from funcpipe.core.trace import uses_of

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
