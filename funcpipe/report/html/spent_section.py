"""The time and money spent, and possible changes with their prices."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from funcpipe.core import Bill, Plan, Use
from funcpipe.core.texts import counted
from funcpipe.core.trace import IN_STEPS
from funcpipe.report.changes import Change, changes
from funcpipe.report.html.charts import COLOURS, chart
from funcpipe.report.html.markup import Drawing, Section, paragraph, seconds, table, usd
from funcpipe.report.html.material import Material
from funcpipe.report.time_use import StageUse, account, time_use

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
    return table(f"Function time and its price, {where}", ("stage", *(use.value for use in used), "all"), rows)


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
    return table(
        "What to change, each for one iteration, priced by the planner's cost model",
        ("change", "seconds", "dollars", "trade"),
        rows,
    )


def _rate(change: Change) -> str:
    """The price of an hour saved, or the gain from an hour given."""
    hourly = abs(change.more_usd / change.more_s) * 3600 if change.more_s else 0.0
    return f"{'costs' if change.more_s < 0 else 'saves'} {usd(hourly)} an hour of training"
