"""Descriptions of the starts of functions: the parts that they took, by how ready their environments were."""

from collections.abc import Mapping, Sequence
from statistics import median

from funcpipe.core import WorkerReport
from funcpipe.core.start import Readiness, StartPart, StartTimes, median_parts
from funcpipe.core.texts import number_text
from funcpipe.show.describe import Column, Table, seconds

_LEAST_S = 5e-4
"""A shorter part of a start is not shown."""


def parts_text(parts: Mapping[str, float]) -> str:
    """Return the parts of a start that took any time, in one line."""
    return ", ".join(f"{name} {seconds(took_s)}" for name, took_s in parts.items() if took_s >= _LEAST_S)


def start_text(start: StartTimes) -> str:
    """Return a start in one line."""
    parts = parts_text(start.parts)
    return f"{start.readiness.value}, {seconds(start.seconds)}" + (f": {parts}" if parts else "")


def starts(workers: Sequence[WorkerReport]) -> Table | None:
    """Return what the starts of functions took, part by part: medians by their readiness; None if none is known."""
    known = [report.start for report in workers if report.start is not None and report.first_step is not None]
    parts = [part.value for part in StartPart if any(part.value in start.parts for start in known)]
    columns = (
        *(Column("readiness", text=True), Column("starts")),
        *(Column(f"{name} s", drop=1) for name in parts),
        *(Column("all s"), Column("first step s")),
    )
    rows = []
    for readiness in Readiness:
        own = [start for start in known if start.readiness is readiness]
        if own:
            steps = [start.first_step_s for start in own if start.first_step_s is not None]
            medians = median_parts(own)
            rows.append(
                (
                    *(readiness.value, str(len(own))),
                    *(number_text(medians.get(name, 0.0), 3) for name in parts),
                    number_text(median(start.seconds for start in own), 3),
                    number_text(median(steps), 3) if steps else "-",
                )
            )
    return Table(columns=columns, rows=tuple(rows), title="What starts took, medians") if rows else None
