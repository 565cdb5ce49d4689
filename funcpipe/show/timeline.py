"""The lanes of functions over time: as letters, as a picture, and as a chart of the page."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from funcpipe.core import Event, Resource, Trace, worker_name
from funcpipe.core.distribution import needed_from
from funcpipe.show.material import Material
from funcpipe.show.page_parts import COLOURS, TOOLS, Drawing, Section, bars, chart, set_hover

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LETTERS = "f forward, j joint loss, b backward, l load, > and < transfers, s synchronisation, n norm, u update, . idle"
NAMES = {
    "l": "load",
    "f": "forward",
    "j": "joint loss",
    "b": "backward",
    ">": "upload, or to the host",
    "<": "download, or to the device",
    "s": "synchronisation",
    "n": "norm",
    "u": "update",
    "waiting": "waiting for a message",
}
_ROW_PX = 17

Lane = tuple[int, int, Resource]
Span = tuple[str, float, float]


def letter(task: str) -> str:
    """Return the letter for the kind of a task, which is given as text (see `LETTERS`)."""
    kind = task.partition(".")[0]
    if kind.endswith(("-to-host", "-to-device")):
        return ">" if kind.endswith("host") else "<"
    if kind.endswith("norm"):
        return "n"
    if any(word in kind for word in ("split", "merge", "flatten", "tied")):
        return "s"
    return {"put": ">", "get": "<"}.get(kind[:3], kind[0])


def lanes_of(*traces: Trace) -> dict[Lane, int]:
    """Return the lanes in the order of functions, each with the number of its row."""
    order = list(Resource)
    found = {(e.stage, e.replica, e.lane) for trace in traces for e in trace.events}
    return {lane: row for row, lane in enumerate(sorted(found, key=lambda r: (r[0], r[1], order.index(r[2]))))}


def lane_name(lane: Lane) -> str:
    """Return the name of a lane: its worker, and what it is."""
    return f"{worker_name(*lane[:2])} {lane[2].value}"


def spans_of(event: Event) -> list[Span]:
    """Return the waiting and the working part of an event, each with its kind, its start and its end."""
    begun_s = event.start_s + event.waited_s
    parts = [("waiting", event.start_s, begun_s), (letter(event.task), begun_s, event.end_s)]
    return [part for part in parts if part[2] > part[1]]


def gantt_lines(trace: Trace, *, columns: int) -> list[str]:
    """Return a line with `columns` letters for each lane, then a line that explains the letters."""
    rows = {lane: ["."] * columns for lane in lanes_of(trace)}
    scale = columns / trace.end_s if trace.end_s else 0.0
    for event in trace.events:
        row = rows[event.stage, event.replica, event.lane]
        first, last = int(event.start_s * scale), int(event.end_s * scale)
        for column in range(first, min(max(last, first + 1), columns)):
            row[column] = letter(event.task)
    width = max(map(len, map(lane_name, rows)), default=0)
    return [*(f"{lane_name(lane):{width}} {''.join(row)}" for lane, row in rows.items()), LETTERS]


def draw(predicted: Trace, observed: Trace, path: str | Path) -> None:
    """Draw a predicted iteration above an observed one, to the same scale, into `path`; its suffix gives the format.

    Needs matplotlib, which is imported only when it draws.
    """
    _draw_all({"predicted": predicted.from_zero(), "observed": observed.from_zero()}, path)


def draw_one(trace: Trace, path: str | Path) -> None:
    """Draw one trace, by itself, into `path`; its suffix gives the format. Needs matplotlib."""
    _draw_all({"one iteration": trace.from_zero()}, path)


def _draw_all(traces: Mapping[str, Trace], path: str | Path) -> None:
    with needed_from("figures"):
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

    lanes = max(len(lanes_of(trace)) for trace in traces.values())
    figure = Figure(figsize=(14, 1.5 + 0.17 * lanes * len(traces)), layout="constrained")
    panels = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, trace) in zip(panels, traces.items(), strict=True):
        _draw_lanes(axes, trace)
        axes.set_title(f"{title}: {trace.duration_s:.3f} s", fontsize=9)
    axes.set_xlabel("seconds")
    handles = [Patch(color=COLOURS[key], label=name) for key, name in NAMES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7)
    figure.savefig(path, dpi=150)


def _draw_lanes(axes: "Axes", trace: Trace) -> None:
    lanes = lanes_of(trace)
    for event in trace.events:
        row = lanes[event.stage, event.replica, event.lane]
        for kind, start_s, end_s in spans_of(event):
            axes.broken_barh([(start_s, end_s - start_s)], (row - 0.42, 0.84), facecolors=COLOURS[kind], linewidth=0)
    axes.set_yticks(range(len(lanes)), [lane_name(lane) for lane in lanes], fontsize=6)
    axes.invert_yaxis()


def timeline_section(material: Material) -> Section | None:
    """Return the section of the page: every lane, what was observed above what was predicted; None without a trace."""
    traces = [trace for trace in (material.observed, material.predicted) if trace is not None and trace.events]
    if not traces:
        return None
    traced = [traces[0].from_zero()]
    if len(traces) == 2:
        traced.append(_repeated(traces[1].from_zero(), traced[0]))
    return Section(name="timeline", title="Timeline", parts=(_timeline(traced, both=len(traces) == 2),))


def _timeline(traces: Sequence[Trace], *, both: bool) -> Drawing:
    lanes = lanes_of(*traces)
    drawn = chart(height=80 + _ROW_PX * len(lanes), label="seconds", tools=f"{TOOLS},hover")
    drawn.y_range.start, drawn.y_range.end = len(lanes) - 0.4, -0.6
    ticks = {row: lane_name(lane) for lane, row in lanes.items()}
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
    meaning = (
        "Of each lane, the upper bar is what was observed, the lower one what was predicted for that step, from the "
        "step's own start."
        if both
        else f"What was {source} on each lane."
    )
    return Drawing(
        figure=drawn,
        legend=tuple((name, COLOURS[key]) for key, name in NAMES.items()),
        zooms=True,
        caption=f"{meaning} Use the buttons, or drag over the chart, to zoom. The sums are in “Where it went”.",
    )


def _bars(drawn: Any, trace: Trace, lanes: dict[Lane, int], top: float, bottom: float) -> None:
    """Draw the bars of a trace."""
    of_kind: dict[str, list[tuple[Event, float, float]]] = {}
    for event in trace.events:
        for kind, start_s, end_s in spans_of(event):
            of_kind.setdefault(kind, []).append((event, start_s, end_s))
    for kind, spans in of_kind.items():
        rows = np.array([lanes[e.stage, e.replica, e.lane] for e, *_ in spans], dtype=np.float32)
        bars(
            drawn,
            trace.source.value,
            COLOURS[kind],
            left=np.array([start for _, start, _ in spans]),
            right=np.array([end for _, _, end in spans]),
            top=rows + np.float32(top),
            bottom=rows + np.float32(bottom),
            task=[event.task for event, *_ in spans],
            bytes=np.array([event.payload_bytes for event, *_ in spans], dtype=np.float64),
        )


def _repeated(predicted: Trace, observed: Trace) -> Trace:
    """Return the predicted iteration again for each observed step, from where that began."""
    starts: dict[int, float] = {}
    for event in observed.events:
        if event.lane is not Resource.LOAD:
            starts[event.step] = min(starts.get(event.step, event.start_s), event.start_s)
    events = tuple(
        replace(e, step=step, start_s=e.start_s + start, end_s=e.end_s + start)
        for step, start in starts.items()
        for e in predicted.events
    )
    return Trace(run=predicted.run, source=predicted.source, events=events)
