"""Sections of the page on a run: its progress, where time and money went, and its bill."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from funcpipe.analysis.compare import StageUse, account, time_use
from funcpipe.analysis.improve import Change, changes
from funcpipe.core import Bill, FinishedRun, Outcome, Plan, Trace, Use, worker_name
from funcpipe.core.texts import counted
from funcpipe.core.trace import IN_STEPS
from funcpipe.show.describe import Table, seconds, usd
from funcpipe.show.material import Material
from funcpipe.show.page_parts import (
    COLOURS,
    Drawing,
    Section,
    chart,
    paragraph,
    set_hover,
    table,
)
from funcpipe.show.runs import bill, estimate
from funcpipe.show.starts import starts


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
        parts.append(table(Table.of("Restarts and hand-overs", ("worker", "step", "what"), rows)))
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


_COLOURS = {
    Use.COMPUTE: COLOURS["f"],
    Use.SYNC: COLOURS["s"],
    Use.TRANSFER: COLOURS[">"],
    Use.LOAD: COLOURS["l"],
    Use.WAIT: COLOURS["waiting"],
    Use.BUBBLE: "#c3cad2",
    Use.VALIDATION: COLOURS["n"],
    Use.SAVE: COLOURS["<"],
    Use.START: COLOURS["u"],
    Use.LOST: "#7a1f1f",
}
_MOST_CHANGES = 12


def spent_section(material: Material) -> Section | None:
    """The section; None if there is neither a trace nor what changes could be priced with."""
    parts: list[Drawing | str] = []
    trace, finished = material.observed or material.predicted, material.finished
    uses = () if finished is None else account(finished)
    if finished is not None and uses:
        of = "the run since it was resumed" if finished.bill.earlier_usd else "the whole run"
        parts += [_advice(uses), _shares(uses, of), _table(uses, f"in {of}"), _on_the_bill(finished.bill)]
        took = starts(finished.workers)
        parts += [] if took is None else [table(took)]
    elif trace is not None and trace.events:
        uses = time_use(trace)
        steps = f"{trace.source.value}, {counted(len(trace.steps()), 'step')}"
        parts += [_advice(uses), _shares(uses, steps), _table(uses, f"in the steps of the trace ({steps})")]
    if material.plan is not None and material.profile is not None and material.spec is not None:
        parts.append(_changes(material.plan, changes(material.plan, material.profile, material.spec)))
    elif parts:
        parts.append(paragraph("Add the plan and its profile to see what to change, with prices.", kind="note"))
    return Section(name="spent", title="Where it went", parts=tuple(parts)) if parts else None


def _advice(uses: Sequence[StageUse]) -> str:
    total = {use: sum(stage.seconds[use] for stage in uses) for use in Use}
    whole = sum(total.values()) or 1.0
    largest = max(total, key=total.__getitem__)
    return paragraph(
        f"The largest part of function time is {largest.value}: {total[largest] / whole:.0%} of {seconds(whole)} over "
        "all functions. Work that overlaps with computing counts as compute."
    )


def _on_the_bill(bill: Bill) -> str:
    """The place of the table's sums on the bill."""
    return paragraph(
        f"The bill has the same {seconds(bill.function_seconds)} of {counted(bill.functions, 'function')}, for "
        f"{usd(bill.compute_usd)}.",
        kind="note",
    )


def _shares(uses: Sequence[StageUse], source: str) -> Drawing:
    rows = [_name(use) for use in uses]
    drawn = chart(height=90 + 34 * len(rows), label="share of the stage's function time, %", y_range=rows[::-1])
    wholes = [sum(stage.seconds.values()) or 1.0 for stage in uses]
    used = [use for use in Use if any(stage.seconds[use] for stage in uses)]
    columns = {
        use.name: [100 * stage.seconds[use] / whole for stage, whole in zip(uses, wholes, strict=True)] for use in used
    }
    drawn.hbar_stack(
        [use.name for use in used],
        y="stage",
        height=0.6,
        color=[_COLOURS[use] for use in used],
        source={"stage": rows, **columns},
    )
    drawn.x_range.start, drawn.x_range.end = 0, 100
    legend = tuple((use.value, _COLOURS[use]) for use in used)
    return Drawing(figure=drawn, legend=legend, caption=f"How the functions of each stage spent their time ({source}).")


def _name(use: StageUse) -> str:
    return "without a report" if use.stage is None else f"stage {use.stage}"


def _table(uses: Sequence[StageUse], where: str) -> str:
    used = [use for use in Use if use in IN_STEPS or any(stage.seconds[use] for stage in uses)]
    rows = []
    for stage in uses:
        rows.append((_name(stage), *_sums([stage.seconds], used, seconds)))
        if stage.usd is not None:
            rows.append((f"{_name(stage)}, price", *_sums([stage.usd], used, usd)))
    if len(uses) > 1:
        rows.append(("all", *_sums([stage.seconds for stage in uses], used, seconds)))
        prices = [stage.usd for stage in uses if stage.usd is not None]
        rows += [("all, price", *_sums(prices, used, usd))] if prices else []
    names = ("stage", *(use.value for use in used), "all")
    return table(Table.of(f"Function time and its price, {where}", names, rows))


def _sums(values: Sequence[Mapping[Use, float]], used: Sequence[Use], text: Callable[[float], str]) -> Iterator[str]:
    """The cells of a row: the sums of `values` by use, and of all."""
    sums = [sum(of_stage[use] for of_stage in values) for use in used]
    return map(text, (*sums, sum(sums)))


def _changes(plan: Plan, found: Sequence[Change]) -> str:
    if not found:
        return paragraph("No single change of a size, schedule, synchronisation or format saves time or money.")
    rows = [
        (
            change.what + (" (rounds numbers)" if change.numerics else ""),
            f"{change.more_s:+.4g} s",
            f"{change.more_usd:+.3g} $",
            "saves both" if change.more_s <= 0 and change.more_usd <= 0 else _rate(change),
        )
        for change in found[:_MOST_CHANGES]
    ]
    title = "What to change, each for one iteration, priced by the planner's cost model"
    return table(Table.of(title, ("change", "seconds", "dollars", "trade"), rows))


def _rate(change: Change) -> str:
    """The price of an hour saved, or the gain from an hour given."""
    hourly = abs(change.more_usd / change.more_s) * 3600 if change.more_s else 0.0
    return f"{'costs' if change.more_s < 0 else 'saves'} {usd(hourly)} an hour of training"


def bill_section(material: Material) -> Section | None:
    """Return the bill of a run, item by item, beside what was estimated; None if there is neither."""
    found, finished = material.estimate, material.finished
    if finished is not None:
        steps, earlier = len(finished.losses), 0
        if material.record is not None:  # the bill is of what the run has done since it was last started
            earlier = material.record.first_step - material.record.began_step
        described = bill(finished.bill, found, steps - earlier, earlier_steps=earlier)
    elif found is not None:
        described = estimate(found)
    else:
        return None
    parts = (*map(table, described.tables), *(paragraph(line, kind="note") for line in described.lines))
    return Section(name="bill", title=described.title, parts=parts)
