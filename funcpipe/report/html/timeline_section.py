"""The timeline: every lane of every function, what was observed above what was predicted."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from funcpipe.core import Event, Resource, Trace, worker_name
from funcpipe.report.gantt import NAMES, letter
from funcpipe.report.html.charts import COLOURS, TOOLS, chart, set_hover
from funcpipe.report.html.markup import Drawing, Section
from funcpipe.report.html.material import Material

_ROW_PX = 17

Lane = tuple[int, int, Resource]
Span = tuple[Event, float, float]


def timeline_section(material: Material) -> Section | None:
    """The section; None without a trace."""
    traces = [trace for trace in (material.observed, material.predicted) if trace is not None and trace.events]
    if not traces:
        return None
    traced = [traces[0].from_zero()]
    if len(traces) == 2:
        traced.append(_repeated(traces[1].from_zero(), traced[0]))
    return Section(name="timeline", title="Timeline", parts=(_timeline(traced, both=len(traces) == 2),))


def _timeline(traces: Sequence[Trace], *, both: bool) -> Drawing:
    lanes = _lanes(traces)
    drawn = chart(height=80 + _ROW_PX * len(lanes), label="seconds", tools=f"{TOOLS},hover")
    drawn.y_range.start, drawn.y_range.end = len(lanes) - 0.4, -0.6
    ticks = {row: f"{worker_name(s, r)} {lane.value}" for (s, r, lane), row in lanes.items()}
    drawn.yaxis.ticker, drawn.yaxis.major_label_overrides = list(ticks), ticks
    drawn.yaxis.major_label_text_font_size = "10px"
    end_s = max(trace.end_s for trace in traces) or 1.0
    drawn.x_range.start, drawn.x_range.end = -0.01 * end_s, 1.01 * end_s
    bands = ((-0.42, 0.1), (0.12, 0.42)) if both else ((-0.4, 0.4),)
    for trace, (top, bottom) in zip(traces, bands, strict=True):
        _bars(drawn, trace, lanes, top, bottom)
    tooltips = (("task", "@task"), ("from", "@left{0.0000} s to @right{0.0000} s"), ("", "$name, @bytes{0,0} bytes"))
    set_hover(drawn, tooltips)
    source = traces[0].source.value
    said = (
        "Of each lane, the upper bar is what was observed, the lower one what was predicted for that step, from the "
        "step's own start."
        if both
        else f"What was {source} on each lane."
    )
    return Drawing(
        figure=drawn,
        legend=tuple((NAMES[key], COLOURS[key]) for key in COLOURS),
        zooms=True,
        caption=f"{said} Use the buttons, or drag over the chart, to zoom. The sums are in “Where it went”.",
    )


def _lanes(traces: Sequence[Trace]) -> dict[Lane, int]:
    order = list(Resource)
    found = {(e.stage, e.replica, e.lane) for trace in traces for e in trace.events}
    return {lane: row for row, lane in enumerate(sorted(found, key=lambda r: (r[0], r[1], order.index(r[2]))))}


def _bars(drawn: Any, trace: Trace, lanes: dict[Lane, int], top: float, bottom: float) -> None:
    """The bars of a trace in one glyph for each colour: colours of single bars would take long to read."""
    of_kind: dict[str, list[Span]] = {}
    for event in trace.events:
        for kind, start_s, end_s in _spans(event):
            of_kind.setdefault(kind, []).append((event, start_s, end_s))
    for kind, spans in of_kind.items():
        rows = np.array([lanes[e.stage, e.replica, e.lane] for e, *_ in spans], dtype=np.float32)
        drawn.quad(
            left="left",
            right="right",
            top="top",
            bottom="bottom",
            fill_color=COLOURS[kind],
            line_color=None,
            name=trace.source.value,
            source={
                "left": np.array([start for _, start, _ in spans]),
                "right": np.array([end for _, _, end in spans]),
                "top": rows + np.float32(top),
                "bottom": rows + np.float32(bottom),
                "task": [event.task for event, *_ in spans],
                "bytes": np.array([event.payload_bytes for event, *_ in spans], dtype=np.float64),
            },
        )


def _spans(event: Event) -> list[tuple[str, float, float]]:
    """The waiting and the working part of an event, each with its kind."""
    begun_s = event.start_s + event.waited_s
    parts = [("waiting", event.start_s, begun_s), (letter(event.task), begun_s, event.end_s)]
    return [part for part in parts if part[2] > part[1]]


def _repeated(predicted: Trace, observed: Trace) -> Trace:
    """The predicted iteration again for each observed step, from where that began."""
    starts: dict[int, float] = {}
    for event in observed.events:
        if event.lane is not Resource.LOAD:
            starts[event.step] = min(starts.get(event.step, event.start_s), event.start_s)
    return Trace(
        run=predicted.run,
        source=predicted.source,
        events=tuple(
            Event(
                task=e.task, stage=e.stage, replica=e.replica, lane=e.lane, step=step, payload_bytes=e.payload_bytes,
                start_s=e.start_s + start, end_s=e.end_s + start, waited_s=e.waited_s,
            )
            for step, start in starts.items()
            for e in predicted.events
        ),
    )  # fmt: skip
