"""A picture of what functions with a GPU compute, and of their messages over the link and over the bus.

`python -m experiments.studies.large_models --figure` draws it.
"""

from collections.abc import Iterator
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from funcpipe.core import Event, Plan, PlatformSpec, Resource, Trace
from funcpipe.show.page_parts import COLOURS
from funcpipe.show.timeline import spans_of

LANES = ("from the store", "bus, to the GPU", "compute", "bus, to the host", "to the store")
"""The lanes of a function, in the order in which a micro-batch passes them."""

_APART = len(LANES) + 0.6
_THINNEST = 2e-3
"""The share of a picture's width below which a bar could not be seen."""


def parts(event: Event, plan: Plan, spec: PlatformSpec) -> Iterator[tuple[str, str, float, float]]:
    """Yield the lane, the kind, and the first and last second of each part of an event.

    A message crosses the bus before its link on the way out, and after it on the way in (`crossing_link` in
    `partitioner/cost/formulas.py`).
    """
    accelerator = spec.size(plan.stages[event.stage].size).accelerator
    assert accelerator is not None
    assert accelerator.host_device_gb_s is not None
    bus_s = event.payload_bytes / (1e9 * accelerator.host_device_gb_s)
    incoming, to_device, compute, to_host, outgoing = LANES
    for kind, start_s, end_s in spans_of(event):
        if event.lane is Resource.COMPUTE:
            yield compute, kind, start_s, end_s
        elif event.lane is Resource.UPLOAD:
            yield to_host, kind, start_s, start_s + bus_s
            yield outgoing, kind, start_s + bus_s, end_s
        elif event.lane is Resource.DOWNLOAD and kind != "waiting":
            yield incoming, kind, start_s, end_s - bus_s
            yield to_device, kind, end_s - bus_s, end_s


def draw(trace: Trace, plan: Plan, spec: PlatformSpec, path: Path) -> None:
    """Draw the lanes of each function in a whole step, and around the first message."""
    trace = trace.from_zero()
    sent = next(event for event in trace.events if event.lane is Resource.UPLOAD)
    read = next(event for event in trace.events if event.lane is Resource.DOWNLOAD)
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    whole, near = figure.subplots(2, 1)
    _draw_lanes(whole, trace, plan, spec, (0.0, trace.end_s))
    whole.set_title(f"a step of {plan.micro_batches} micro-batches", fontsize=10)
    _draw_lanes(near, trace, plan, spec, (sent.start_s - 0.1, read.end_s + 0.1))
    near.set_title("its first message", fontsize=10)
    near.set_xlabel("seconds")
    named = {"f": "forward", "b": "backward", ">": "message out", "<": "message in"}
    handles = [Patch(color=COLOURS[key], label=name) for key, name in named.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)


def _draw_lanes(axes: Axes, trace: Trace, plan: Plan, spec: PlatformSpec, window_s: tuple[float, float]) -> None:
    """Draw the events in a window, each part at least so wide that it is seen."""
    least_s = _THINNEST * (window_s[1] - window_s[0])
    for event in trace.events:
        for lane, kind, start_s, end_s in parts(event, plan, spec):
            row = _APART * event.stage + LANES.index(lane)
            axes.broken_barh([(start_s, max(end_s - start_s, least_s))], (row - 0.4, 0.8), facecolors=COLOURS[kind])
    rows = {_APART * i + j: f"{i + 1}: {lane}" for i in range(len(plan.stages)) for j, lane in enumerate(LANES)}
    axes.set_yticks(list(rows), list(rows.values()), fontsize=8)
    axes.set_xlim(*window_s)
    axes.invert_yaxis()
