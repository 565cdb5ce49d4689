"""The functions of a run from invocation to end, as a chart of the page."""

from collections.abc import Iterator, Sequence

from funcpipe.core import PlatformSpec, WorkerReport
from funcpipe.core.start import StartPart
from funcpipe.platforms.launch_rate import launched_after_s
from funcpipe.show.material import Material
from funcpipe.show.page_parts import COLOURS, TOOLS, Drawing, Section, bars, chart, set_hover
from funcpipe.show.timeline import Span

_BEFORE = {
    "environment": (StartPart.ENVIRONMENT,),
    "interpreter and modules": (StartPart.INTERPRETER, StartPart.TORCH, StartPart.MODULES),
}
"""The phases before a report's `started_at_s`."""

_PHASES = {
    **_BEFORE,
    "code and tensors": (StartPart.CODE, StartPart.TENSORS),
    "waiting for a predecessor": (StartPart.PREDECESSOR,),
    "set-up": (StartPart.WARM_UP, StartPart.SETUP),
}
_STEPS = "steps"
_COLOURS = {
    name: COLOURS[key] for name, key in zip((*_PHASES, _STEPS), ("n", "u", "l", "waiting", ">", "f"), strict=True)
}
_ROW_PX, _MOST_PX = 14, 1400


def functions_section(material: Material) -> Section | None:
    """Return the section of the page; None without a report that says what a start took."""
    rows = phases_of(() if material.finished is None else material.finished.workers)
    if not rows:
        return None
    return Section(name="functions", title="Functions", parts=(_drawing(rows, material.spec),))


def phases_of(workers: Sequence[WorkerReport]) -> list[tuple[WorkerReport, list[Span]]]:
    """Return the functions whose starts are known, in order of invocation, each with its phases.

    A phase is its name, and the seconds of its begin and end since the first invocation, by the functions' own clocks.
    """
    known = [(report, _invoked_s(report)) for report in workers if report.start is not None]
    first_s = min((invoked_s for _, invoked_s in known), default=0.0)
    known.sort(key=lambda pair: pair[1])
    return [(report, list(_phases(report, invoked_s - first_s, first_s))) for report, invoked_s in known]


def _invoked_s(report: WorkerReport) -> float:
    return report.started_at_s - sum(_took_s(report, parts) for parts in _BEFORE.values())


def _took_s(report: WorkerReport, parts: Sequence[StartPart]) -> float:
    assert report.start is not None
    return sum(report.start.parts.get(part.value, 0.0) for part in parts)


def _phases(report: WorkerReport, now_s: float, first_s: float) -> Iterator[Span]:
    for name, parts in _PHASES.items():
        begin_s, now_s = now_s, now_s + _took_s(report, parts)
        yield name, begin_s, now_s
    yield _STEPS, now_s, max(report.ended_at_s - first_s, now_s)


def _drawing(rows: Sequence[tuple[WorkerReport, list[Span]]], spec: PlatformSpec | None) -> Drawing:
    drawn = chart(height=min(80 + _ROW_PX * len(rows), _MOST_PX), label="seconds", tools=f"{TOOLS},hover")
    drawn.y_range.start, drawn.y_range.end = len(rows) - 0.4, -0.6
    drawn.yaxis.visible = len(rows) * _ROW_PX < _MOST_PX
    names = {row: f"{report.worker}, {report.attempt}" for row, (report, _) in enumerate(rows)}
    drawn.yaxis.ticker, drawn.yaxis.major_label_overrides = list(names), names
    glyphs = []
    for name, colour in _COLOURS.items():
        own = [(row, *phase) for row, (_, phases) in enumerate(rows) for phase in phases if phase[0] == name]
        at, _, left, right = (list(column) for column in zip(*own, strict=True))
        top, bottom = ([row + edge for row in at] for edge in (-0.4, 0.4))
        function = [names[row] for row in at]
        glyphs.append(bars(drawn, name, colour, left=left, right=right, top=top, bottom=bottom, function=function))
    set_hover(drawn, (("", "@function"), ("$name", "@left{0.00} s to @right{0.00} s")), glyphs)
    caption = "Each function from its invocation to its end, with its worker and attempt, by its own clock."
    if spec is not None:
        first = [row for row, (report, _) in enumerate(rows) if report.attempt == 0]
        ready_s = [launched_after_s(number + 1, spec)[0] + spec.cold_start_s for number in range(len(first))]
        drawn.line(ready_s, first, color="#d9534f", line_width=2, line_dash="dashed")
        caption += " The dashed line: when first attempts may be ready, by the platform's launch rate and cold start."
    return Drawing(figure=drawn, legend=tuple(_COLOURS.items()), zooms=True, caption=caption)
