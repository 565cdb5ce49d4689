"""Loss, throughput and dollars over the steps of a run, with restarts and hand-overs marked."""

from collections import defaultdict
from dataclasses import dataclass

from funcpipe.core import FinishedRun, Outcome, Resource, Trace, worker_name
from funcpipe.report.html.charts import COLOURS, chart, set_hover
from funcpipe.report.html.markup import Drawing, Section, paragraph, table
from funcpipe.report.html.material import Material


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A worker began a new attempt in this step; `why` says whether it was handed over or restarted."""

    step: int
    worker: str
    why: str


def progress_section(material: Material) -> Section | None:
    """The section; None without losses and without observed steps."""
    trace, finished = material.observed, material.finished
    found = marks(trace, finished)
    parts: list[Drawing | str] = []
    if finished is not None and finished.losses:
        began = 0 if material.record is None else material.record.began_step
        steps = list(range(began + 1, began + 1 + len(finished.losses)))
        parts.append(_line("Mean loss of each step.", "loss", steps, list(finished.losses), "f", found))
    ends = {} if trace is None else step_ends(trace)
    if trace is not None and len(ends) > 1:
        steps, seconds = _durations(ends)
        samples = None if material.plan is None else material.plan.global_batch
        rates = [(samples or 1) / s if s > 0 else 0.0 for s in seconds]
        unit = "samples/s" if samples else "steps/s"
        parts.append(_line(f"Throughput of each step, in {unit}.", unit, steps, rates, "b", found))
        parts += _dollars(trace, ends, found)
    if not parts:
        return None
    if found:
        rows = [(mark.worker, str(mark.step + 1), mark.why) for mark in found]
        parts.append(table("Restarts and hand-overs", ("worker", "step", "what"), rows))
    elif trace is not None:
        parts.append(paragraph("No function was restarted or handed over in the steps of the trace.", kind="note"))
    return Section(name="progress", title="Progress", parts=tuple(parts))


def marks(trace: Trace | None, finished: FinishedRun | None) -> tuple[Mark, ...]:
    """The steps in which a worker's events are of a later attempt than before."""
    first: dict[tuple[int, int, int], int] = {}
    for event in () if trace is None else trace.events:
        key = (event.stage, event.replica, event.attempt)
        first[key] = min(first.get(key, event.step), event.step)
    outcomes = {(r.worker, r.attempt): r.outcome for r in (() if finished is None else finished.workers)}
    begun: dict[tuple[int, int], int] = {}
    found = []
    for (stage, replica, attempt), step in sorted(first.items()):
        if begun.setdefault((stage, replica), attempt) != attempt or attempt > 0:
            worker = worker_name(stage, replica)
            ended = outcomes.get((worker, attempt - 1))
            found.append(Mark(step=step, worker=worker, why=_why(ended)))
    return tuple(sorted(found, key=lambda mark: (mark.step, mark.worker)))


def _why(ended: Outcome | None) -> str:
    if ended is Outcome.HANDED_OVER:
        return "handed over"
    return "started again" if ended is None else f"started again: the attempt before had {ended.value}"


def step_ends(trace: Trace) -> dict[int, float]:
    """When each step ended, in seconds of the trace."""
    ends: dict[int, float] = defaultdict(float)
    for event in trace.events:
        if event.lane is not Resource.LOAD:
            ends[event.step] = max(ends[event.step], event.end_s)
    return dict(sorted(ends.items()))


def _durations(ends: dict[int, float]) -> tuple[list[int], list[float]]:
    """The steps whose predecessor is known, counted from 1, and the seconds between their ends."""
    steps = [step for step in ends if step - 1 in ends]
    return [step + 1 for step in steps], [ends[step] - ends[step - 1] for step in steps]


def _dollars(trace: Trace, ends: dict[int, float], found: tuple[Mark, ...]) -> list[Drawing | str]:
    """What functions and requests had cost by the end of each step."""
    prices = trace.prices
    if prices is None:
        return []
    workers = {(event.stage, event.replica) for event in trace.events}
    usd_s = sum(prices.function_usd_s[stage] for stage, _ in workers)
    asked: dict[int, float] = defaultdict(float)
    for event in trace.events:
        asked[event.step] += prices.transfer_usd(event)
    begin_s, requests_usd, spent = min(event.start_s for event in trace.events), 0.0, []
    for step, end_s in ends.items():
        requests_usd += asked[step]
        spent.append((end_s - begin_s) * usd_s + requests_usd)
    caption = "Dollars by the end of each step, from the trace's begin: functions and transfers."
    return [_line(caption, "$", [step + 1 for step in ends], spent, "u", found)]


def _line(
    caption: str, unit: str, steps: list[int], values: list[float], colour: str, found: tuple[Mark, ...]
) -> Drawing:
    drawn = chart(height=210, label="step", tools="xbox_zoom,hover,reset", y_axis_label=unit)
    from bokeh.models.annotations import Span

    drawn.line(steps, values, color=COLOURS[colour], line_width=2)
    drawn.scatter(steps, values, color=COLOURS[colour], size=5 if len(steps) < 100 else 2)
    if unit != "loss":
        drawn.y_range.start, drawn.y_range.end = 0, 1.1 * max(values, default=0.0) or 1.0
    for mark in found:
        dash = "dotted" if mark.why == "handed over" else "dashed"
        drawn.add_layout(
            Span(location=mark.step + 1, dimension="height", line_dash=dash, line_color="#d9534f", line_width=2)
        )
    set_hover(drawn, [("step", "@x"), (unit, "@y")])
    marked = " Red lines: restarts (dashed) and hand-overs (dotted)." if found else ""
    return Drawing(figure=drawn, caption=caption + marked)
