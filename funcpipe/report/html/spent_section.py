"""Where time and money went, and what to change, each change with its price."""

from collections.abc import Sequence

from funcpipe.core import Plan
from funcpipe.report.changes import Change, changes
from funcpipe.report.html.charts import COLOURS, chart
from funcpipe.report.html.markup import Drawing, Section, paragraph, seconds, table, usd
from funcpipe.report.html.material import Material
from funcpipe.report.time_use import StageUse, Use, time_use

_COLOURS = {
    Use.COMPUTE: COLOURS["f"],
    Use.SYNC: COLOURS["s"],
    Use.TRANSFER: COLOURS[">"],
    Use.LOAD: COLOURS["l"],
    Use.WAIT: COLOURS["waiting"],
    Use.BUBBLE: "#c3cad2",
    Use.START: COLOURS["u"],
}
_MOST_CHANGES = 12


def spent_section(material: Material) -> Section | None:
    """The section; None if there is neither a trace nor what changes could be priced with."""
    parts: list[Drawing | str] = []
    trace = material.observed or material.predicted
    if trace is not None and trace.events:
        workers = () if material.finished is None or material.observed is None else material.finished.workers
        uses = time_use(trace, workers)
        parts += [_advice(uses), _shares(uses, trace.source.value), _table(uses)]
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
        f"Most function time is {largest.value}: {total[largest] / whole:.0%} of {seconds(whole)} over all functions. "
        "Work that overlaps with computing counts as compute."
    )


def _shares(uses: Sequence[StageUse], source: str) -> Drawing:
    rows = [f"stage {use.stage}" for use in uses]
    drawn = chart(height=90 + 34 * len(rows), label="share of the stage's function time, %", y_range=rows[::-1])
    wholes = [sum(stage.seconds.values()) or 1.0 for stage in uses]
    shown = [use for use in Use if any(stage.seconds[use] for stage in uses)]
    columns = {
        use.name: [100 * stage.seconds[use] / whole for stage, whole in zip(uses, wholes, strict=True)] for use in shown
    }
    drawn.hbar_stack(
        [use.name for use in shown],
        y="stage",
        height=0.6,
        color=[_COLOURS[use] for use in shown],
        source={"stage": rows, **columns},
    )
    drawn.x_range.start, drawn.x_range.end = 0, 100
    legend = tuple((use.value, _COLOURS[use]) for use in shown)
    return Drawing(figure=drawn, legend=legend, caption=f"How the functions of each stage spent their time ({source}).")


def _table(uses: Sequence[StageUse]) -> str:
    rows = []
    for stage in uses:
        whole = sum(stage.seconds.values())
        rows.append((f"stage {stage.stage}", *(seconds(stage.seconds[use]) for use in Use), seconds(whole)))
        if stage.usd is not None:
            dollars = (usd(stage.usd[use]) for use in Use)
            rows.append((f"stage {stage.stage}, price", *dollars, usd(sum(stage.usd.values()))))
    return table("Function time and its price", ("stage", *(use.value for use in Use), "all"), rows)


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
    """What an hour costs that is saved, or earns that is given."""
    hourly = abs(change.more_usd / change.more_s) * 3600 if change.more_s else 0.0
    return f"{'costs' if change.more_s < 0 else 'saves'} {usd(hourly)} an hour of training"
