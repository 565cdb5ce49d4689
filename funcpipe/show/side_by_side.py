"""Plans, or traces of runs, side by side: a row for each quantity, a column for each file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from funcpipe.analysis.compare import time_use
from funcpipe.core import MB, Plan, Trace, read, read_trace
from funcpipe.core.trace import IN_STEPS, TRACE_FORMAT
from funcpipe.errors import InputError
from funcpipe.show.describe import Column, Description, Table
from funcpipe.show.material import document_format


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """The values of a quantity for each of `names`, in the same order; "" where one is not known."""

    names: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]

    def plain(self) -> dict[str, Any]:
        """The table for JSON: the known values of each file."""
        return {
            name: {what: values[i] for what, values in self.rows.items() if values[i]}
            for i, name in enumerate(self.names)
        }


def side_by_side(paths: Sequence[str]) -> SideBySide:
    """Read plans, or traces, and put them side by side.

    Raises InputError for fewer than two, and for plans beside traces; FormatError for other files.
    """
    if len(paths) < 2:
        raise InputError("name two files or more to compare")
    traced = [document_format(path) == TRACE_FORMAT for path in paths]
    if any(traced) and not all(traced):
        raise InputError("plans are compared with plans, and traces with traces: name one kind of file")
    columns = [_of_trace(read_trace(path)) if all(traced) else _of_plan(read(Plan, path)) for path in paths]
    quantities = dict.fromkeys(what for column in columns for what in column)
    return SideBySide(
        names=tuple(paths),
        rows={what: tuple(column.get(what, "") for column in columns) for what in quantities},
    )


def _of_plan(plan: Plan) -> dict[str, str]:
    found = {
        "model": plan.model,
        "platform": plan.platform,
        "global batch": str(plan.global_batch),
        "micro-batch": str(plan.micro_batch),
        "stages": str(len(plan.stages)),
        "replicas": str(plan.replicas),
        "cuts before layer": ", ".join(str(stage.first) for stage in plan.stages[1:]) or "none",
        "sizes": ", ".join(stage.size for stage in plan.stages),
        "recomputes": ", ".join(str(i) for i, stage in enumerate(plan.stages) if stage.recompute) or "none",
        "schedule": plan.schedule.value,
        "synchronisation": plan.sync.value,
        "meetings": plan.meetings if plan.replicas > 1 else "none",
        "loss of": plan.loss_of,
        "travels in": "/".join(wire.value for wire in plan.wires),
    }
    estimate = plan.estimate
    if estimate is not None:
        found |= {
            "iteration s": f"{estimate.iteration_s:.4g}",
            "with a meeting s": f"{estimate.iteration_s if estimate.meeting_s is None else estimate.meeting_s:.4g}",
            "dollars": f"{estimate.cost_usd:.4g}",
            "of functions": f"{estimate.compute_usd:.4g}",
            "of requests": f"{estimate.request_usd:.4g}",
            "puts": str(estimate.puts),
            "gets": str(estimate.gets),
            "memory MB": ", ".join(f"{stage.memory_bytes / MB:.0f}" for stage in estimate.stages),
            "bottleneck": estimate.bottleneck,
        }
    return found


def _of_trace(trace: Trace) -> dict[str, str]:
    steps, uses = len(trace.steps()), time_use(trace)
    found = {
        "run": trace.run,
        "source": trace.source.value,
        "functions": str(len({(event.stage, event.replica) for event in trace.events})),
        "steps": str(steps),
        "seconds": f"{trace.steps_s:.4g}",
        "seconds a step": f"{trace.steps_s / steps:.4g}" if steps else "",
        "bytes moved": f"{sum(event.payload_bytes for event in trace.events):,}",
    }
    whole = sum(sum(stage.seconds.values()) for stage in uses)
    for use in IN_STEPS if whole else ():
        found[f"{use.value} %"] = f"{100 * sum(stage.seconds[use] for stage in uses) / whole:.1f}"
    if trace.prices is not None:
        requests = sum(trace.prices.transfer_usd(event) for event in trace.events)
        found["dollars"] = f"{requests + sum(sum((stage.usd or {}).values()) for stage in uses):.4g}"
    return found


def beside(found: SideBySide) -> Description:
    """Return a row for each quantity, a column for each file; what differs is marked."""
    columns = (Column("", text=True), *(Column(name, text=True) for name in found.names))
    rows = ((f"{'*' if len(set(values)) > 1 else ' '} {what}", *values) for what, values in found.rows.items())
    table = Table(columns=columns, rows=tuple(rows))
    return Description(title=f"{len(found.names)} side by side; * marks what differs", tables=(table,))
