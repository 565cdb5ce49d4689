"""Profiles, plans, predictions, platforms and storages in a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from funcpipe.core import MB, Estimate, ModelProfile, Plan, PlatformSpec, Trace
from funcpipe.core.stores import KINDS
from funcpipe.core.texts import number_text
from funcpipe.partitioner.problem.goal import reason_for
from funcpipe.show.terminal import Column, print_table

if TYPE_CHECKING:
    from funcpipe.partitioner.alternatives import Front, WhatIf

from funcpipe.core import StorageReport

_GANTT_LABEL = len("s0.r0 download ") + 3
"""Room for the name of a lane, with numbers of some digits."""


def profile(measured: ModelProfile, path: str, console: Console) -> None:
    """The profile's layers."""
    columns = (
        *(Column("layer", text=True), Column("parameters MB", drop=1), Column("activations MB", drop=2)),
        *(Column("forward ms"), Column("backward ms")),
    )
    rows = [
        (
            layer.name,
            number_text(layer.parameter_bytes / MB, 2),
            number_text(layer.activation_bytes / MB, 2),
            number_text(layer.forward_s[-1] * 1e3, 2),
            number_text(layer.backward_s[-1] * 1e3, 2),
        )
        for layer in measured.layers
    ]
    title = f"{measured.model}: {len(measured.layers)} layers, micro-batch {measured.micro_batch}"
    print_table(console, title, columns, rows)
    kind = "estimated for" if measured.estimated else "measured on"
    if measured.data is not None:
        console.print(
            f"loading a micro-batch: {number_text(measured.data.load_s * 1e3, 2)} ms, "
            f"{number_text(measured.data.batch_bytes / MB, 2)} MB; "
            f"the dataset takes {number_text(measured.data.resident_bytes / MB, 0)} MB"
        )
    console.print(f"times {kind} {measured.platform} {measured.sizes[-1]}; written to {path}")


def plan(chosen: Plan, path: str, console: Console) -> None:
    """The plan's stages, and the predicted time and cost of an iteration."""
    columns = (
        *(Column("stage"), Column("layers"), Column("function", text=True), Column("memory MB")),
        *(Column("forward s", drop=3), Column("backward s", drop=2), Column("sync s", drop=1)),
    )
    estimate = chosen.estimate
    assert estimate is not None, "a plan that was optimised has an estimate"
    rows = [
        (
            str(number),
            f"{stage.first}..{stage.stop - 1}",
            stage.size + (" recompute" if stage.recompute else ""),
            f"{needs.memory_bytes / MB:.0f} of {stage.memory_mb}",
            number_text(needs.forward_s, 4),
            number_text(needs.backward_s, 4),
            number_text(needs.sync_s, 4),
        )
        for number, (stage, needs) in enumerate(zip(chosen.stages, estimate.stages, strict=True))
    ]
    shape = f"{len(chosen.stages)} stages x {chosen.replicas} replicas"
    print_table(console, f"{chosen.model} on {chosen.platform}: {shape}, {chosen.schedule.value}", columns, rows)
    console.print(
        f"iteration {number_text(estimate.iteration_s, 3)} s, ${number_text(estimate.cost_usd, 6)} "
        f"(functions ${number_text(estimate.compute_usd, 6)}, requests ${number_text(estimate.request_usd, 6)}"
        + (f", hours of stores ${number_text(estimate.hours_usd, 6)}); " if estimate.hours_usd else "); ")
        + f"bottleneck: {estimate.bottleneck}"
    )
    if chosen.prices_note:
        console.print(chosen.prices_note)
    if not chosen.stores.is_default:
        console.print("stores: " + ", ".join(f"{kind} in {getattr(chosen.stores, kind)}" for kind in KINDS))
    if reason := reason_for(chosen):
        wires = f"activations {chosen.wire.value}, their gradients {chosen.gradient_wire.value}"
        console.print(f"formats: {wires}, sums {chosen.wire_sync.value}: {reason}")
    if chosen.replicas > 1:
        console.print(f"replicas sum gradients by: {chosen.synchronisation}")
    if chosen.joint_loss:
        exchange_s = estimate.stages[-1].joint_s
        exchanged = f"; replicas exchange outputs in {exchange_s:.3f} s" if chosen.replicas > 1 else ""
        console.print(f"the loss is computed for {chosen.loss_of}, once all forwards are done{exchanged}")
    solver = chosen.solver
    if solver is not None and solver.simulated_s is not None:
        off = solver.simulated_s / estimate.iteration_s - 1
        console.print(
            f"simulated: iteration {number_text(solver.simulated_s, 3)} s ({off:+.1%}), "
            f"${number_text(solver.simulated_usd or 0.0, 6)}; "
            f"the best of {solver.simulated_plans} plans that were simulated"
        )
    if solver is not None:
        among = "" if solver.merged_layers is None else f" over {solver.merged_layers} merged layers"
        if solver.sync_ways is not None:
            among += f" with {solver.sync_ways} {'way' if solver.sync_ways == 1 else 'ways'} of synchronising"
        proof = "" if solver.bound is not None else ", without a proof"
        console.print(
            f"{solver.name}: {solver.status.value}{among}{proof} in {solver.solve_s:.2f} s; written to {path}"
        )


def what_if(found: "WhatIf", path: str, console: Console) -> None:
    """Today's plan, the same plan after the changes, and the best plan after them."""
    columns = (Column("plan", text=True), *_COSTS, *_SHAPE)
    rows = []
    if found.now is not None and found.now.estimate is not None:
        rows.append(("now", *_costs(found.now.estimate), *_shape(found.now)))
    if found.now is not None and found.kept is not None:
        rows.append(("same plan, changed", *_costs(found.kept), *_shape(found.now)))
    assert found.best.estimate is not None, "a plan that was optimised has an estimate"
    rows.append(("best plan, changed", *_costs(found.best.estimate), *_shape(found.best)))
    title = f"{found.best.model}, batch {found.best.global_batch}: now, and after the changes"
    print_table(console, title, columns, rows)
    if found.obstacle is not None:
        console.print(f"{'now' if found.now is None else 'same plan, changed'}: {found.obstacle}")
    console.print(f"best plan, changed: written to {path}")


def front(found: "Front", path: str, console: Console) -> None:
    """Plans from the fastest to the cheapest, with the notable ones marked."""
    marks: dict[int, list[str]] = {}
    for weight, place in found.marked.items():
        marks.setdefault(place, []).append(f"weight {weight}")
    marks.setdefault(found.recommended, []).append("recommended")
    rows = []
    for place, chosen in enumerate(found.plans):
        assert chosen.estimate is not None, "a plan that was optimised has an estimate"
        rows.append((*_costs(chosen.estimate), *_shape(chosen), ", ".join(marks.get(place, []))))
    title = f"{found.model} on {found.platform}, batch {found.global_batch}: {len(found.plans)} plans"
    print_table(console, title, (*_COSTS, *_SHAPE, Column("marks", text=True)), rows)
    console.print(f"{found.status.value} in {found.solve_s:.2f} s; recommended plan written to {path}")


_COSTS = (Column("iteration s"), Column("iteration $"))
_SHAPE = (Column("stages", drop=1), Column("replicas"), Column("memory MB", text=True))


def _costs(estimate: Estimate) -> tuple[str, str]:
    return number_text(estimate.iteration_s, 3), number_text(estimate.cost_usd, 6)


def _shape(chosen: Plan) -> tuple[str, str, str]:
    memory = " ".join(str(stage.memory_mb) for stage in chosen.stages)
    return str(len(chosen.stages)), str(chosen.replicas), memory


def simulation(trace: Trace, chosen: Plan, console: Console, *, gantt: bool) -> None:
    """The simulated iteration in a line; with `gantt`, its lanes over time."""
    console.print(f"iteration {number_text(trace.end_s, 4)} s, {len(trace.events)} tasks on {chosen.workers} functions")
    if gantt:
        from funcpipe.show.timeline import gantt_lines

        for line in gantt_lines(trace, columns=max(console.width - _GANTT_LABEL, 20)):
            console.print(line, overflow="crop", no_wrap=True)


def platforms(specs: Sequence[PlatformSpec], console: Console) -> None:
    """All platforms, a line each."""
    for spec in specs:
        sizes = f"{spec.sizes[0].memory_mb} to {spec.sizes[-1].memory_mb} MB"
        console.print(f"{spec.name:12} {spec.region}, {sizes}, as of {spec.as_of}")


def platform(spec: PlatformSpec, console: Console) -> None:
    """One platform's sizes."""
    columns = (
        *(Column("size", text=True), Column("memory MB"), Column("vCPU")),
        *(Column("up MB/s", drop=2), Column("down MB/s", drop=1), Column("$/s")),
    )
    rows = [
        (
            size.name,
            str(size.memory_mb),
            f"{size.vcpu:.3f}",
            f"{size.upload_bytes_s / 1e6:.0f}",
            f"{size.download_bytes_s / 1e6:.0f}",
            f"{size.price_usd_s:.9f}",
        )
        for size in spec.sizes
    ]
    print_table(console, f"{spec.name}, {spec.region}, as of {spec.as_of}", columns, rows)
    console.print(f"latency {spec.latency_s:g} s; source: {spec.source}")
    for name, source in spec.sources.items():
        console.print(f"  {name}: {source}")


def storage_report(report: StorageReport, console: Console) -> None:
    """Latencies of small requests and bandwidths of large bodies."""
    requests = {"put": report.put, "get": report.get, "get of nothing": report.empty_get}
    print_table(
        console,
        f"{report.storage}: {report.requests} requests of each kind",
        (Column("request", text=True), Column("median ms"), Column("p95 ms")),
        [
            (name, number_text(times.median_s * 1e3, 2), number_text(times.p95_s * 1e3, 2))
            for name, times in requests.items()
        ],
    )
    together = f"{report.streams} streams MB/s"
    rows = [
        ("up", report.upload_bytes_s, report.upload_together_bytes_s),
        ("down", report.download_bytes_s, report.download_together_bytes_s),
    ]
    print_table(
        console,
        f"bodies of at most {report.body_bytes / 1e6:.0f} MB",
        (Column("direction", text=True), Column("one stream MB/s"), Column(together)),
        [(name, f"{one / 1e6:.0f}", f"{several / 1e6:.0f}") for name, one, several in rows],
    )
