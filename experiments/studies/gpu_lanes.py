"""A picture of what functions with a GPU compute, and of their messages over the link and over the bus.

`python -m experiments.studies.large_models --figure` draws it.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from funcpipe.core import Plan, Resource, Trace
from funcpipe.show.page_parts import COLOURS
from funcpipe.show.timeline import spans_of

LANES = {
    Resource.DOWNLOAD: "from the store",
    Resource.TO_DEVICE: "bus, to the GPU",
    Resource.COMPUTE: "compute",
    Resource.TO_HOST: "bus, to the host",
    Resource.UPLOAD: "to the store",
}
"""The lanes of a function that are drawn, in the order in which a micro-batch passes them."""

_APART = len(LANES) + 0.6
_THINNEST = 2e-3
"""The share of a picture's width below which a bar could not be seen."""


def draw(trace: Trace, plan: Plan, path: Path) -> None:
    """Draw the lanes of each function in a whole step, and around the first message."""
    trace = trace.from_zero()
    sent = next(event for event in trace.events if event.lane is Resource.TO_HOST)
    read = next(event for event in trace.events if event.lane is Resource.TO_DEVICE)
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    whole, near = figure.subplots(2, 1)
    _draw_lanes(whole, trace, plan, (0.0, trace.end_s))
    whole.set_title(f"a step of {plan.micro_batches} micro-batches", fontsize=10)
    _draw_lanes(near, trace, plan, (sent.start_s - 0.1, read.end_s + 0.1))
    near.set_title("its first message", fontsize=10)
    near.set_xlabel("seconds")
    named = {"f": "forward", "b": "backward", ">": "message out", "<": "message in"}
    handles = [Patch(color=COLOURS[key], label=name) for key, name in named.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)


def _draw_lanes(axes: Axes, trace: Trace, plan: Plan, window_s: tuple[float, float]) -> None:
    """Draw the events in a window, each part at least so wide that it is seen."""
    least_s, order = _THINNEST * (window_s[1] - window_s[0]), list(LANES)
    for event in (event for event in trace.events if event.lane in LANES):
        row = _APART * event.stage + order.index(event.lane)
        for kind, start_s, end_s in spans_of(event):
            if kind != "waiting":
                bar = start_s, max(end_s - start_s, least_s)
                axes.broken_barh([bar], (row - 0.4, 0.8), facecolors=COLOURS[kind])
    names = LANES.values()
    rows = {_APART * i + j: f"{i + 1}: {lane}" for i in range(len(plan.stages)) for j, lane in enumerate(names)}
    axes.set_yticks(list(rows), list(rows.values()), fontsize=8)
    axes.set_xlim(*window_s)
    axes.invert_yaxis()
