"""Loss, throughput and dollars over the steps of a run, with restarts and hand-overs marked."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from funcpipe.core import FinishedRun, Outcome, Trace, worker_name
from funcpipe.report.html.charts import COLOURS, chart, set_hover
from funcpipe.report.html.markup import Drawing, Section, paragraph, table
from funcpipe.report.html.material import Material


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A worker began a new attempt in this step, if that is known; `why`: it was handed over, or restarted."""

    step: int | None
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
    if trace is not None and len(windows := trace.windows()) > 1:
        unit, rates = throughput(trace)
        caption = f"Throughput in {unit}, from the end of the step before, with what lay between them."
        parts.append(_line(caption, unit, [step + 1 for step in rates], list(rates.values()), "b", found))
        spent = dollars(trace)
        caption = f"Dollars of the {len(windows)} steps of the trace, added up: functions and transfers."
        parts += [_line(caption, "$", [step + 1 for step in spent], list(spent.values()), "u", found)] if spent else []
    if not parts:
        return None
    if found:
        rows = [(mark.worker, "" if mark.step is None else str(mark.step + 1), mark.why) for mark in found]
        parts.append(table("Restarts and hand-overs", ("worker", "step", "what"), rows))
    elif trace is not None:
        where = "the steps of the trace" if finished is None else "the run"
        where += " since it was resumed" if finished is not None and finished.bill.earlier_usd else ""
        parts.append(paragraph(f"No function was restarted or handed over in {where}.", kind="note"))
    return Section(name="progress", title="Progress", parts=tuple(parts))


def marks(trace: Trace | None, finished: FinishedRun | None) -> tuple[Mark, ...]:
    """The steps with which later attempts of workers began, as they reported; else as in the trace.

    A trace has the last steps of each attempt: its first step there is where it began only if the worker did the one
    before in another attempt.
    """
    begun: dict[tuple[str, int], int | None] = {}
    outcomes: dict[tuple[str, int], Outcome] = {}
    if finished is not None:
        outcomes = {(report.worker, report.attempt): report.outcome for report in finished.workers}
        begun = {(worker, before): None for worker, attempt in outcomes for before in range(attempt)}
        begun |= {(report.worker, report.attempt): report.first_step for report in finished.workers}
    elif trace is not None:
        known: dict[tuple[str, int], int] = {}
        for event in trace.events:
            known[worker_name(event.stage, event.replica), event.step] = event.attempt
        for (worker, step), attempt in sorted(known.items(), key=lambda item: item[0]):
            begun.setdefault((worker, attempt), step if (worker, step - 1) in known else None)
    found = [
        Mark(step=step, worker=worker, why=_why(outcomes, worker, attempt))
        for (worker, attempt), step in begun.items()
        if attempt
    ]
    return tuple(sorted(found, key=lambda mark: (mark.step is None, mark.step or 0, mark.worker)))


def _why(outcomes: Mapping[tuple[str, int], Outcome], worker: str, attempt: int) -> str:
    if not outcomes:
        return "started again"
    ended = outcomes.get((worker, attempt - 1))
    if ended is Outcome.HANDED_OVER:
        return "handed over"
    return "started again: the attempt before " + ("left no report" if ended is None else f"had {ended.value}")


def throughput(trace: Trace) -> tuple[str, dict[int, float]]:
    """The unit, and by step what was done each second since the step before ended; other steps are left out.

    Samples where the trace says how many a step had, else steps.
    """
    windows = trace.windows()
    seconds = {step: end_s - begin_s for step, (begin_s, end_s) in windows.items() if step - 1 in windows}
    counted = trace.samples if all(step in trace.samples for step in seconds) else dict.fromkeys(seconds, 1)
    unit = "samples/s" if counted is trace.samples else "steps/s"
    return unit, {step: counted[step] / took_s if took_s > 0 else 0.0 for step, took_s in seconds.items()}


def dollars(trace: Trace) -> dict[int, float]:
    """The cost of functions and requests by the end of each step of the trace; empty without prices.

    A function counts in the steps of which its events are known.
    """
    prices = trace.prices
    if prices is None:
        return {}
    asked, usd_s = defaultdict[int, float](float), defaultdict[int, float](float)
    for event in trace.events:
        asked[event.step] += prices.transfer_usd(event)
    for step, stage, _ in {(event.step, event.stage, event.replica) for event in trace.events}:
        usd_s[step] += prices.function_usd_s[stage]
    spent_usd, found = 0.0, dict[int, float]()
    for step, (begin_s, end_s) in trace.windows().items():
        spent_usd += (end_s - begin_s) * usd_s[step] + asked[step]
        found[step] = spent_usd
    return found


def _line(
    caption: str, unit: str, steps: list[int], values: list[float], colour: str, found: tuple[Mark, ...]
) -> Drawing:
    drawn = chart(height=210, label="step", tools="xbox_zoom,hover,reset", y_axis_label=unit)
    from bokeh.models.annotations import Span

    drawn.line(steps, values, color=COLOURS[colour], line_width=2)
    drawn.scatter(steps, values, color=COLOURS[colour], size=5 if len(steps) < 100 else 2)
    if unit != "loss":
        drawn.y_range.start, drawn.y_range.end = 0, 1.1 * max(values, default=0.0) or 1.0
    for step, why in ((mark.step, mark.why) for mark in found):
        if step is None:
            continue
        dash = "dotted" if why == "handed over" else "dashed"
        drawn.add_layout(
            Span(location=step + 1, dimension="height", line_dash=dash, line_color="#d9534f", line_width=2)
        )
    set_hover(drawn, [("step", "@x"), (unit, "@y")])
    marked = " Red lines: restarts (dashed) and hand-overs (dotted)." if found else ""
    return Drawing(figure=drawn, caption=caption + marked)
