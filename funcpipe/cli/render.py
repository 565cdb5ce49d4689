"""How results look in a terminal."""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from funcpipe.core import MB, Estimate, ModelProfile, Plan, PlatformSpec, Trace

if TYPE_CHECKING:
    from funcpipe.client.results import Progress as RunProgress
    from funcpipe.client.results import RunResult
    from funcpipe.partitioner.analysis.front import Front
    from funcpipe.partitioner.analysis.whatif import WhatIf
    from funcpipe.report.compare import Report
    from funcpipe.training.verify import Verification


def as_json(value: Any) -> str:
    """`value` as one JSON text."""
    return json.dumps(value, indent=1) + "\n"


def show(machine: bool, text: str, draw: Callable[[Console], None]) -> None:
    """Print `text` for machines, or let `draw` draw for people."""
    if machine:
        print(text, end="")
    else:
        draw(Console(highlight=False))


@contextlib.contextmanager
def profiling() -> Iterator[Callable[[str, float], None]]:
    """A progress bar on the error output; yields what to call with a layer's name and the share that is done."""
    columns = (TextColumn("profiling"), BarColumn(), TextColumn("{task.percentage:>3.0f}% {task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda name, share: bar.update(task, completed=share, description=name)


@contextlib.contextmanager
def training(*, quiet: bool) -> Iterator[Callable[["RunProgress"], None]]:
    """A progress bar on the error output; yields what to call after each step."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:.0f} samples/s  ${task.fields[cost]:.6f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("", total=None, loss=float("nan"), rate=0.0, cost=0.0)

        def on_progress(progress: "RunProgress") -> None:
            bar.update(
                task,
                total=progress.steps,
                completed=progress.step,
                loss=progress.loss,
                rate=progress.samples_per_s,
                cost=progress.cost_usd,
            )

        yield on_progress


def profile(measured: ModelProfile, path: str, console: Console) -> None:
    """The profile's layers."""
    table = Table(title=f"{measured.model}: {len(measured.layers)} layers, micro-batch {measured.micro_batch}")
    for name in ("layer", "parameters MB", "activations MB", "forward ms", "backward ms"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for layer in measured.layers:
        table.add_row(
            layer.name,
            f"{layer.parameter_bytes / MB:.2f}",
            f"{layer.activation_bytes / MB:.2f}",
            f"{layer.forward_s[-1] * 1e3:.2f}",
            f"{layer.backward_s[-1] * 1e3:.2f}",
        )
    console.print(table)
    kind = "estimated for" if measured.estimated else "measured on"
    console.print(f"times {kind} {measured.platform} {measured.sizes[-1]}; written to {path}")


def plan(chosen: Plan, path: str, console: Console) -> None:
    """The plan's stages and what it is expected to take."""
    table = Table(
        title=f"{chosen.model} on {chosen.platform}: {len(chosen.stages)} stages x {chosen.replicas} replicas, "
        f"{chosen.schedule.value}"
    )
    for name in ("stage", "layers", "function", "memory MB", "forward s", "backward s", "synchronisation s"):
        table.add_column(name, justify="right")
    estimate = chosen.estimate
    assert estimate is not None, "a plan that was optimised has an estimate"
    for number, (stage, needs) in enumerate(zip(chosen.stages, estimate.stages, strict=True)):
        table.add_row(
            str(number),
            f"{stage.first}..{stage.stop - 1}",
            stage.size + (" recompute" if stage.recompute else ""),
            f"{needs.memory_bytes / MB:.0f} of {stage.memory_mb}",
            f"{needs.forward_s:.4f}",
            f"{needs.backward_s:.4f}",
            f"{needs.sync_s:.4f}",
        )
    console.print(table)
    console.print(
        f"iteration {estimate.iteration_s:.3f} s, ${estimate.cost_usd:.6f} "
        f"(functions ${estimate.compute_usd:.6f}, requests ${estimate.request_usd:.6f}); "
        f"held up by {estimate.bottleneck}"
    )
    if chosen.solver is not None:
        console.print(f"{chosen.solver.name}: {chosen.solver.status.value} in {chosen.solver.solve_s:.2f} s; {path}")


def what_if(found: "WhatIf", path: str, console: Console) -> None:
    """The plan as things are, the same plan after the changes, and the best plan then."""
    table = Table(title=f"{found.best.model}, batch {found.best.global_batch}: now, and after the changes")
    for name in ("", "iteration s", "iteration $", "stages", "replicas", "memory MB"):
        table.add_column(name, justify="right" if name else "left")
    if found.now is not None and found.now.estimate is not None:
        table.add_row("now", *_what_it_takes(found.now.estimate), *_shape(found.now))
    if found.now is not None and found.kept is not None:
        table.add_row("this plan then", *_what_it_takes(found.kept), *_shape(found.now))
    assert found.best.estimate is not None, "a plan that was optimised has an estimate"
    table.add_row("the best then", *_what_it_takes(found.best.estimate), *_shape(found.best))
    console.print(table)
    if found.obstacle is not None:
        console.print(f"{'now' if found.now is None else 'this plan then'}: {found.obstacle}")
    console.print(f"the best plan then: {path}")


def _what_it_takes(estimate: Estimate) -> tuple[str, str]:
    return f"{estimate.iteration_s:.3f}", f"{estimate.cost_usd:.6f}"


def _shape(chosen: Plan) -> tuple[str, str, str]:
    memory = " ".join(str(stage.memory_mb) for stage in chosen.stages)
    return str(len(chosen.stages)), str(chosen.replicas), memory


def front(found: "Front", path: str, console: Console) -> None:
    """Plans from the fastest to the cheapest, with those that are marked."""
    marks: dict[int, list[str]] = {}
    for weight, place in found.marked.items():
        marks.setdefault(place, []).append(f"weight {weight}")
    marks.setdefault(found.recommended, []).append("recommended")
    table = Table(title=f"{found.model} on {found.platform}, batch {found.global_batch}: {len(found.plans)} plans")
    for name in ("iteration s", "$ / iteration", "stages", "replicas", "functions' memory MB", "marks"):
        table.add_column(name, justify="left" if name == "marks" else "right")
    for place, chosen in enumerate(found.plans):
        assert chosen.estimate is not None, "a plan that was optimised has an estimate"
        table.add_row(*_what_it_takes(chosen.estimate), *_shape(chosen), ", ".join(marks.get(place, [])))
    console.print(table)
    console.print(f"{found.status.value} in {found.solve_s:.2f} s; the recommended plan: {path}")


def simulation(trace: Trace, chosen: Plan, console: Console, *, gantt: bool) -> None:
    """The simulated iteration in a line; its lanes over time if wanted."""
    console.print(f"iteration {trace.end_s:.4f} s, {len(trace.events)} tasks on {chosen.workers} functions")
    if gantt:
        from funcpipe.report.gantt import gantt_lines

        for line in gantt_lines(trace, columns=100):
            console.print(line, overflow="crop", no_wrap=True)


def detached(run: str, storage: str, console: Console) -> None:
    """How to find a run again."""
    console.print(f"run {run} was left to itself; `funcpipe status {run} --storage {storage}` says how it fares,")
    console.print(f"`funcpipe train … --storage {storage} --resume {run}` waits for it and collects what it leaves")


def training_result(result: "RunResult", options: argparse.Namespace, console: Console) -> None:
    """What a run took and where its files are."""
    bill = result.bill
    console.print(
        f"{result.run}: loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f} in {len(result.losses)} steps; "
        f"{bill.functions} functions, {bill.function_seconds:.1f} s, {bill.puts} puts, {bill.gets} gets: "
        f"${bill.cost_usd:.6f} at the prices of {bill.platform}"
    )
    for what, path in (("trace", options.trace), ("state_dict", options.output)):
        if path:
            console.print(f"{what}: {path}")


def verification(found: "Verification", console: Console) -> None:
    """Every tensor of the model, and whether it agrees."""
    table = Table(title=f"{found.steps} steps over functions beside one process")
    for name in ("layer", "tensor", "relative difference", ""):
        table.add_column(name, justify="right" if name.startswith("relative") else "left")
    for tensor in found.tensors:
        verdict = "equal" if tensor.difference <= found.tolerance else "DIFFERS"
        table.add_row(tensor.layer, tensor.name, f"{tensor.difference:.2e}", verdict)
    console.print(table)
    if found.agrees:
        console.print(f"all {len(found.tensors)} tensors agree to {found.tolerance:g}")


def comparison(found: "Report", path: str, console: Console) -> None:
    """Predicted beside observed, lane by lane."""
    table = Table(title=f"{found.run}: one iteration, median of {found.steps} steps")
    for name in ("stage", "lane", "predicted s", "observed s", "ratio", "wait s", "idle s", "predicted", "$", "idle $"):
        table.add_column(name, justify="left" if name == "lane" else "right")
    for lane in found.lanes:
        table.add_row(
            str(lane.stage),
            lane.lane.value,
            f"{lane.predicted.busy_s:.4f}",
            f"{lane.observed.busy_s:.4f}",
            "-" if lane.ratio is None else f"{lane.ratio:.2f}",
            f"{lane.observed.wait_s:.4f}",
            f"{lane.observed.idle_s:.4f}",
            f"{lane.predicted.idle_s:.4f}",
            "-" if lane.observed.usd is None else f"{lane.observed.usd:.7f}",
            "-" if not lane.observed.idle_usd else f"{lane.observed.idle_usd:.7f}",
        )
    console.print(table)
    ratio = "" if found.ratio is None else f", ratio {found.ratio:.2f}"
    console.print(
        f"iteration: predicted {found.predicted_iteration_s:.4f} s, observed {found.observed_iteration_s:.4f} s{ratio}"
    )
    console.print(f"trace: {path} (open it at https://ui.perfetto.dev)")


def platforms(specs: Sequence[PlatformSpec], console: Console) -> None:
    """All platforms, a line each."""
    for spec in specs:
        sizes = f"{spec.sizes[0].memory_mb} to {spec.sizes[-1].memory_mb} MB"
        console.print(f"{spec.name:12} {spec.region}, {sizes}, as of {spec.as_of}")


def platform(spec: PlatformSpec, console: Console) -> None:
    """One platform's sizes."""
    table = Table(title=f"{spec.name}, {spec.region}, as of {spec.as_of}")
    for name in ("size", "memory MB", "vCPU", "up MB/s", "down MB/s", "$/s"):
        table.add_column(name, justify="right")
    for size in spec.sizes:
        rates = (f"{size.upload_bytes_s / 1e6:.0f}", f"{size.download_bytes_s / 1e6:.0f}")
        table.add_row(size.name, str(size.memory_mb), f"{size.vcpu:.3f}", *rates, f"{size.price_usd_s:.9f}")
    console.print(table)
    console.print(f"latency {spec.latency_s:g} s; source: {spec.source}")
    for name, source in spec.sources.items():
        console.print(f"  {name}: {source}")
