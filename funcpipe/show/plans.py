"""Descriptions of profiles, plans, predictions, platforms and storages."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from funcpipe.core import MB, DeviceMemory, Estimate, ModelProfile, Plan, PlatformSpec, StorageReport, Trace
from funcpipe.core.estimate import BY_RATES
from funcpipe.core.stores import KINDS
from funcpipe.core.texts import counted, number_text
from funcpipe.show.describe import Column, Description, Table

if TYPE_CHECKING:
    from funcpipe.partitioner.alternatives import Front, WhatIf
    from funcpipe.partitioner.local_steps import RoundChoice


def profile(measured: ModelProfile, path: str | None = None) -> Description:
    """Return the layers, with times on the largest size; the profile was written to `path`."""
    layers = measured.layers
    parameters_mb = number_text(measured.parameter_bytes(0, len(layers)) / MB, 1)
    activations_mb = number_text(sum(layer.activation_bytes for layer in layers) / MB, 1)
    forward_s = sum(layer.forward_s[-1] for layer in layers)
    backward_s = sum(layer.backward_s[-1] for layer in layers)
    kind = "estimated for" if measured.estimated else "measured on"
    facts = [
        ("micro-batch", f"{counted(measured.micro_batch, 'sample')}, {measured.precision.value}"),
        ("memory", f"parameters {parameters_mb} MB, activations {activations_mb} MB"),
        (
            "time",
            f"forward {number_text(forward_s, 4)} s, backward {number_text(backward_s, 4)} s, "
            f"{kind} {measured.platform} {measured.sizes[-1]}",
        ),
    ]
    if (data := measured.data) is not None:
        loading = f"{number_text(data.load_s * 1e3, 2)} ms, {number_text(data.batch_bytes / MB, 2)} MB"
        held = f"the dataset takes {number_text(data.resident_bytes / MB, 0)} MB"
        facts.append(("loading a micro-batch", f"{loading}; {held}"))
    if measured.timed_as:
        count = sum(len(layer.graph_layers) for layer in layers)
        facts.append(("timed", f"{count - len(measured.timed_as)} of {count} layers, which the others equal"))
    columns = (
        *(Column("layer", text=True), Column("parameters MB", drop=1), Column("activations MB", drop=2)),
        *(Column("forward ms"), Column("backward ms")),
    )
    rows = tuple(
        (
            layer.name,
            number_text(layer.parameter_bytes / MB, 2),
            number_text(layer.activation_bytes / MB, 2),
            number_text(layer.forward_s[-1] * 1e3, 2),
            number_text(layer.backward_s[-1] * 1e3, 2),
        )
        for layer in layers
    )
    return Description(
        title=f"Profile of {measured.model} on {measured.platform}: {counted(len(layers), 'layer')}",
        facts=(*facts, *written_to(path)),
        tables=(Table(columns=columns, rows=rows),),
    )


def plan(chosen: Plan, path: str | None = None) -> Description:
    """Return the stages, and the predicted time and cost of an iteration; the plan was written to `path`."""
    estimate = chosen.estimate if _is_whole(chosen) else None
    where = f"{chosen.model or 'a model'} on {chosen.platform or 'no platform'}"
    size = f"{counted(len(chosen.stages), 'stage')} x {counted(chosen.replicas, 'replica')}"
    devices = [] if estimate is None else [needs.device for needs in estimate.stages]
    devices = devices if any(devices) else []
    columns = (
        *(Column("stage"), Column("layers", text=True), Column("function", text=True), Column("memory MB")),
        *((Column("GPU MB"),) if devices else ()),
        *(Column("forward s", drop=3), Column("backward s", drop=2), Column("sync s", drop=1)),
    )
    rows = []
    for number, stage in enumerate(chosen.stages):
        needs = None if estimate is None else estimate.stages[number]
        times = ("",) * 3 if needs is None else (needs.forward_s, needs.backward_s, needs.sync_s)
        rows.append(
            (
                *(str(number), f"{stage.first}..{stage.stop - 1}"),
                stage.size + (" recompute" if stage.recompute else ""),
                ("" if needs is None else f"{needs.memory_bytes / MB:.0f} of ") + str(stage.memory_mb),
                *(() if not devices else (_device_text(devices[number]),)),
                *(time if isinstance(time, str) else number_text(time, 4) for time in times),
            )
        )
    return Description(
        title=f"Plan of {where}: {size}, {chosen.schedule.value}",
        facts=(*_of_plan(chosen), *written_to(path)),
        tables=(Table(columns=columns, rows=tuple(rows)),),
    )


def _device_text(device: DeviceMemory | None) -> str:
    return "" if device is None else f"{device.needs_bytes / MB:.0f} of {device.has_bytes / MB:.0f}"


def _is_whole(chosen: Plan) -> bool:
    return chosen.estimate is not None and len(chosen.estimate.stages) == len(chosen.stages)


def _of_plan(chosen: Plan) -> list[tuple[str, str]]:
    from funcpipe.partitioner.problem.goal import reason_for

    estimate, solver = chosen.estimate, chosen.solver
    wires = "/".join(dict.fromkeys(wire.value for wire in chosen.wires))
    samples = f"{counted(chosen.global_batch, 'sample')}, {chosen.micro_batches} x {chosen.micro_batch}"
    facts = [("batch", f"{samples} in micro-batches, sent as {wires}")]
    if estimate is not None:
        items = {"functions": estimate.compute_usd, "requests": estimate.request_usd}
        items |= {"hours of stores": estimate.hours_usd} if estimate.hours_usd else {}
        parts = ", ".join(f"{name} ${number_text(usd, 6)}" for name, usd in items.items())
        facts.append(("iteration", f"{_time_and_cost(estimate)} ({parts}); bottleneck: {estimate.bottleneck}"))
        if estimate.by_rates:
            facts.append(("seconds on GPUs", BY_RATES))
    if chosen.prices_note:
        facts.append(("prices", chosen.prices_note))
    if not chosen.stores.is_default:
        facts.append(("stores", ", ".join(f"{kind} in {getattr(chosen.stores, kind)}" for kind in KINDS)))
    if reason := reason_for(chosen):
        formats = f"activations {chosen.wire.value}, their gradients {chosen.gradient_wire.value}"
        facts.append(("formats", f"{formats}, sums {chosen.wire_sync.value}: {reason}"))
    facts += _of_sums(chosen)
    if chosen.joint_loss:
        shares = chosen.replicas > 1 and estimate is not None and _is_whole(chosen)
        exchanged = f"; replicas exchange outputs in {estimate.stages[-1].joint_s:.3f} s" if shares and estimate else ""
        facts.append(("loss", f"computed for {chosen.loss_of}, once all forwards are done{exchanged}"))
    if solver is not None:
        if solver.simulated_s is not None:
            by = f" ({solver.simulated_s / estimate.iteration_s - 1:+.1%})" if estimate and estimate.iteration_s else ""
            taken = (
                f"iteration {number_text(solver.simulated_s, 3)} s{by}, ${number_text(solver.simulated_usd or 0.0, 6)}"
            )
            facts.append(("simulated", f"{taken}; the best of {solver.simulated_plans} plans that were simulated"))
        among = "" if solver.merged_layers is None else f" over {solver.merged_layers} merged layers"
        if solver.sync_ways is not None:
            among += f" with {counted(solver.sync_ways, 'way')} of synchronising"
        gap = f", gap {solver.gap:.2%}" if solver.gap and solver.gap >= 5e-5 else ""
        proof = "" if solver.bound is not None else ", without a proof"
        facts.append((solver.name, f"{solver.status.value}{gap}{among}{proof} in {solver.solve_s:.2f} s"))
    return facts


def _of_sums(chosen: Plan) -> Iterator[tuple[str, str]]:
    """How the replicas of a plan sum, and how often."""
    if chosen.trains_locally:
        met_s = None if chosen.estimate is None else chosen.estimate.meeting_s
        step = (
            "" if met_s is None else f"; a step with a meeting takes {number_text(met_s, 3)} s, an iteration the mean"
        )
        yield "meetings", chosen.meetings + step
    if chosen.replicas > 1:
        yield f"replicas sum {'changes' if chosen.trains_locally else 'gradients'} by", chosen.synchronisation


def written_to(path: str | None) -> tuple[tuple[str, str], ...]:
    """Return the fact that a file was written, if it was."""
    return () if path is None else (("", f"written to {path}"),)


def _time_and_cost(estimate: Estimate) -> str:
    return f"{number_text(estimate.iteration_s, 3)} s, ${number_text(estimate.cost_usd, 6)}"


_COSTS = (Column("iteration s"), Column("iteration $"))
_SHAPE = (Column("stages", drop=1), Column("replicas"), Column("memory MB", text=True))


def _costs(estimate: Estimate | None) -> tuple[str, str]:
    assert estimate is not None, "a plan that was optimised has an estimate"
    return number_text(estimate.iteration_s, 3), number_text(estimate.cost_usd, 6)


def _shape(chosen: Plan) -> tuple[str, str, str]:
    memory = " ".join(str(stage.memory_mb) for stage in chosen.stages)
    return str(len(chosen.stages)), str(chosen.replicas), memory


def what_if(found: "WhatIf", path: str) -> Description:
    """Return today's plan, the same plan after the changes, and the best plan after them."""
    rows = []
    if found.now is not None and found.now.estimate is not None:
        rows.append(("now", *_costs(found.now.estimate), *_shape(found.now)))
    if found.now is not None and found.kept is not None:
        rows.append(("same plan, changed", *_costs(found.kept), *_shape(found.now)))
    rows.append(("best plan, changed", *_costs(found.best.estimate), *_shape(found.best)))
    facts = []
    if found.obstacle is not None:
        facts.append(("now" if found.now is None else "same plan, changed", found.obstacle))
    compared = Table(columns=(Column("plan", text=True), *_COSTS, *_SHAPE), rows=tuple(rows))
    return Description(
        title=f"{found.best.model}, batch {found.best.global_batch}: now, and after the changes",
        facts=(*facts, ("best plan, changed", f"written to {path}")),
        tables=(compared, _rounds(found.rounds)) if found.rounds else (compared,),
    )


def _rounds(found: "Sequence[RoundChoice]") -> Table:
    """Return the best plan for each of some numbers of steps between meetings."""
    columns = (
        *(Column("steps"), Column("stages", drop=1), Column("replicas")),
        *(Column("iteration s"), Column("meeting s", drop=2), Column("iteration $"), Column("efficiency")),
    )
    rows = tuple(
        (
            *(str(row.sync_every), str(row.stages), str(row.replicas), number_text(row.iteration_s, 3)),
            *(number_text(row.meeting_s, 3), number_text(row.cost_usd, 6), f"{row.efficiency:.0%}"),
        )
        for row in found
    )
    return Table(title="the best plan, if replicas meet after so many steps", columns=columns, rows=rows)


def front(found: "Front", path: str) -> Description:
    """Return the plans from the fastest to the cheapest, with the notable ones marked."""
    marks: dict[int, list[str]] = {}
    for weight, place in found.marked.items():
        marks.setdefault(place, []).append(f"weight {weight}")
    marks.setdefault(found.recommended, []).append("recommended")
    rows = (
        (*_costs(chosen.estimate), *_shape(chosen), ", ".join(marks.get(place, [])))
        for place, chosen in enumerate(found.plans)
    )
    return Description(
        title=f"{found.model} on {found.platform}, batch {found.global_batch}: {len(found.plans)} plans",
        facts=((found.status.value, f"in {found.solve_s:.2f} s; recommended plan written to {path}"),),
        tables=(Table(columns=(*_COSTS, *_SHAPE, Column("marks", text=True)), rows=tuple(rows)),),
    )


def simulation(made: Trace, chosen: Plan, *, gantt: bool, mean_s: float) -> Description:
    """Return the simulated iteration; the mean of a round takes `mean_s`. With `gantt`, its lanes over time."""
    tasks = f"{len(made.events)} tasks on {chosen.workers} functions"
    met = f" in the mean, {number_text(made.end_s, 4)} s with a meeting" if chosen.trains_locally else ""
    title = f"iteration {number_text(mean_s, 4)} s{met}, {tasks}"
    return Description(title=title, figure=made if gantt else None)


def trace(made: Trace) -> Description:
    """Return the load of the lanes, and the step in the middle over time."""
    steps = made.steps()
    busy_s: dict[str, float] = defaultdict(float)
    for event in made.events:
        busy_s[event.lane.value] += event.busy_s
    workers = {(event.stage, event.replica) for event in made.events}
    lanes = ", ".join(f"{lane} {seconds:.4g} s" for lane, seconds in busy_s.items())
    return Description(
        title=f"Trace ({made.source.value}): {made.run}, {counted(len(made.events), 'event')}",
        facts=(
            ("steps", f"{len(steps)}, numbers {_stretches(steps)}" if len(steps) > 1 else str(len(steps))),
            ("duration", f"{made.steps_s:.4g} s of {counted(len(workers), 'worker')}"),
            ("lanes at work", lanes or "none"),
        ),
        figure=replace(made, events=made.of_step(steps[len(steps) // 2]).events) if steps else None,
    )


def _stretches(steps: Sequence[int]) -> str:
    """Return the numbers of steps, from 1, as text: first and last of those that follow each other."""
    known = set(steps)
    firsts = [step for step in steps if step - 1 not in known]
    lasts = [step for step in steps if step + 1 not in known]
    return ", ".join(f"{first + 1} to {last + 1}" for first, last in zip(firsts, lasts, strict=True))


def platforms(specs: Sequence[PlatformSpec]) -> Description:
    """Return all platforms, a line each."""
    sizes = (f"{spec.sizes[0].memory_mb} to {spec.sizes[-1].memory_mb} MB" for spec in specs)
    lines = (f"{spec.region}, {own}, as of {spec.as_of}" for spec, own in zip(specs, sizes, strict=True))
    return Description(title="", facts=tuple(zip((spec.name for spec in specs), lines, strict=True)))


def platform(spec: PlatformSpec) -> Description:
    """Return one platform's sizes."""
    columns = (
        *(Column("size", text=True), Column("memory MB"), Column("vCPU")),
        *(Column("up MB/s", drop=2), Column("down MB/s", drop=1), Column("$/s")),
    )
    rows = tuple(
        (
            *(size.name, str(size.memory_mb), f"{size.vcpu:.3f}"),
            *(f"{size.upload_bytes_s / 1e6:.0f}", f"{size.download_bytes_s / 1e6:.0f}", f"{size.price_usd_s:.9f}"),
        )
        for size in spec.sizes
    )
    return Description(
        title=f"{spec.name}, {spec.region}, as of {spec.as_of}",
        facts=(("latency", f"{spec.latency_s:g} s"), ("source", spec.source), *spec.sources.items()),
        tables=(Table(columns=columns, rows=rows),),
    )


def storage_report(report: StorageReport) -> Description:
    """Return latencies of small requests and bandwidths of large bodies."""
    requests = {"put": report.put, "get": report.get, "get of nothing": report.empty_get}
    latencies = Table(
        columns=(Column("request", text=True), Column("median ms"), Column("p95 ms")),
        rows=tuple(
            (name, number_text(times.median_s * 1e3, 2), number_text(times.p95_s * 1e3, 2))
            for name, times in requests.items()
        ),
    )
    directions = {
        "up": (report.upload_bytes_s, report.upload_together_bytes_s),
        "down": (report.download_bytes_s, report.download_together_bytes_s),
    }
    several = Column(f"{report.streams} streams MB/s")
    bandwidths = Table(
        title=f"bodies of at most {report.body_bytes / 1e6:.0f} MB",
        columns=(Column("direction", text=True), Column("one stream MB/s"), several),
        rows=tuple((name, *(f"{rate / 1e6:.0f}" for rate in rates)) for name, rates in directions.items()),
    )
    title = f"{report.storage}: {report.requests} requests of each kind"
    return Description(title=title, tables=(latencies, bandwidths))
