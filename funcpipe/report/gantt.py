"""Gantt charts: the lanes of functions over time, as text and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from funcpipe.core import Event, Resource, Trace, worker_name
from funcpipe.core.distribution import needed_from

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LETTERS = "f forward, j joint loss, b backward, l load, > and < transfers, s synchronisation, n norm, u update, . idle"
_COLOURS = {
    "l": "tab:brown",
    "f": "tab:blue",
    "j": "tab:cyan",
    "b": "tab:green",
    ">": "tab:orange",
    "<": "gold",
    "s": "tab:purple",
    "n": "tab:pink",
    "u": "tab:red",
    "waiting": "lightgrey",
}
NAMES = {
    "l": "load",
    "f": "forward",
    "j": "joint loss",
    "b": "backward",
    ">": "upload",
    "<": "download",
    "s": "synchronisation",
    "n": "norm",
    "u": "update",
    "waiting": "waiting for a message",
}

Row = tuple[int, int, Resource]


def gantt_lines(trace: Trace, *, columns: int) -> list[str]:
    """A line with `columns` letters for each lane, then a line that explains the letters."""
    rows = {row: ["."] * columns for row in _rows(trace)}
    scale = columns / trace.end_s if trace.end_s else 0.0
    for event in trace.events:
        row = rows[event.stage, event.replica, event.lane]
        first, last = int(event.start_s * scale), int(event.end_s * scale)
        for column in range(first, min(max(last, first + 1), columns)):
            row[column] = letter(event.task)
    lines = [
        f"{worker_name(stage, replica)} {lane.value:8} {''.join(row)}" for (stage, replica, lane), row in rows.items()
    ]
    return [*lines, LETTERS]


def letter(task: str) -> str:
    """The letter for the kind of a task, which is given as text (see `LETTERS`)."""
    kind = task.partition(".")[0]
    if kind.endswith("norm"):
        return "n"
    if any(word in kind for word in ("split", "merge", "flatten", "tied")):
        return "s"
    return {"put": ">", "get": "<"}.get(kind[:3], kind[0])


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

    lanes = max(len(_rows(trace)) for trace in traces.values())
    figure = Figure(figsize=(14, 1.5 + 0.17 * lanes * len(traces)), layout="constrained")
    panels = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, trace) in zip(panels, traces.items(), strict=True):
        _draw_lanes(axes, trace)
        axes.set_title(f"{title}: {trace.duration_s:.3f} s", fontsize=9)
    axes.set_xlabel("seconds")
    handles = [Patch(color=_COLOURS[key], label=name) for key, name in NAMES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7)
    figure.savefig(path, dpi=150)


def _draw_lanes(axes: "Axes", trace: Trace) -> None:
    rows = _rows(trace)
    for event in trace.events:
        height = rows.index((event.stage, event.replica, event.lane))
        for span, colour in _spans(event):
            axes.broken_barh([span], (height - 0.42, 0.84), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(rows)), [f"{worker_name(s, r)} {lane.value}" for s, r, lane in rows], fontsize=6)
    axes.invert_yaxis()


def _spans(event: Event) -> Sequence[tuple[tuple[float, float], str]]:
    """The waiting and the working part of an event: (start, seconds) and a colour for each."""
    begun_s = event.start_s + event.waited_s
    return (
        ((event.start_s, event.waited_s), _COLOURS["waiting"]),
        ((begun_s, event.end_s - begun_s), _COLOURS[letter(event.task)]),
    )


def _rows(trace: Trace) -> list[Row]:
    order = list(Resource)
    return sorted({(e.stage, e.replica, e.lane) for e in trace.events}, key=lambda r: (r[0], r[1], order.index(r[2])))
