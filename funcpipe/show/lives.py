"""The lives of a run's functions: when each was invoked, began to work and ended, as a chart of the page."""

from collections.abc import Iterator, Sequence

from funcpipe.core import PlatformSpec, WorkerReport
from funcpipe.core.start import StartPart
from funcpipe.platforms.launch_rate import launched_after_s
from funcpipe.show.material import Material
from funcpipe.show.page_parts import COLOURS, TOOLS, Drawing, Section, chart, set_hover

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
_WORK = "steps"
_COLOURS = {
    name: COLOURS[key] for name, key in zip((*_PHASES, _WORK), ("n", "u", "l", "waiting", ">", "f"), strict=True)
}
_ROW_PX, _MOST_PX = 14, 1400

Phase = tuple[str, float, float]


def lives_section(material: Material) -> Section | None:
    """Return the section of the page; None without a report that says what a start took."""
    rows = lives(() if material.finished is None else material.finished.workers)
    if not rows:
        return None
    return Section(name="functions", title="Functions", parts=(_drawing(rows, material.spec),))


def lives(workers: Sequence[WorkerReport]) -> list[tuple[WorkerReport, list[Phase]]]:
    """Return the functions whose starts are known, in order of invocation, each with the phases of its life.

    A phase is its name, and the seconds of its begin and end since the first invocation, by the functions' own clocks.
    """
    found = [(report, list(_phases(report))) for report in workers if report.start is not None]
    found.sort(key=lambda life: life[1][0][1])
    return [
        (report, [(name, begin_s - found[0][1][0][1], end_s - found[0][1][0][1]) for name, begin_s, end_s in phases])
        for report, phases in found
    ]


def _phases(report: WorkerReport) -> Iterator[Phase]:
    assert report.start is not None
    parts = report.start.parts
    now_s = report.started_at_s - sum(parts.get(part.value, 0.0) for named in _BEFORE.values() for part in named)
    for name, named in _PHASES.items():
        begin_s, now_s = now_s, now_s + sum(parts.get(part.value, 0.0) for part in named)
        yield name, begin_s, now_s
    yield _WORK, now_s, max(report.ended_at_s, now_s)


def _drawing(rows: Sequence[tuple[WorkerReport, list[Phase]]], spec: PlatformSpec | None) -> Drawing:
    drawn = chart(height=min(80 + _ROW_PX * len(rows), _MOST_PX), label="seconds", tools=f"{TOOLS},hover")
    drawn.y_range.start, drawn.y_range.end = len(rows) - 0.4, -0.6
    drawn.yaxis.visible = len(rows) * _ROW_PX < _MOST_PX
    names = {row: f"{report.worker}, {report.attempt}" for row, (report, _) in enumerate(rows)}
    drawn.yaxis.ticker, drawn.yaxis.major_label_overrides = list(names), names
    bars = []
    for name, colour in _COLOURS.items():
        own = [(row, phase) for row, (_, phases) in enumerate(rows) for phase in phases if phase[0] == name]
        bars.append(
            drawn.quad(
                left="left",
                right="right",
                top="top",
                bottom="bottom",
                fill_color=colour,
                line_color=None,
                name=name,
                source={
                    "left": [begin_s for _, (_, begin_s, _) in own],
                    "right": [end_s for _, (_, _, end_s) in own],
                    "top": [row - 0.4 for row, _ in own],
                    "bottom": [row + 0.4 for row, _ in own],
                    "function": [names[row] for row, _ in own],
                },
            )
        )
    set_hover(drawn, (("", "@function"), ("$name", "@left{0.00} s to @right{0.00} s")), bars)
    caption = "Each function from its invocation to its end, with its worker and attempt, by their own clocks."
    if spec is not None:
        first = [row for row, (report, _) in enumerate(rows) if report.attempt == 0]
        ready_s = [launched_after_s(number + 1, spec)[0] + spec.cold_start_s for number in range(len(first))]
        drawn.line(ready_s, first, color="#d9534f", line_width=2, line_dash="dashed")
        caption += " The dashed line: when first attempts may be ready, by the platform's launch rate and cold start."
    return Drawing(figure=drawn, legend=tuple(_COLOURS.items()), zooms=True, caption=caption)
