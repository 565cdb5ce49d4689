"""Runs in a terminal: their status, their results, and how those compare."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console

from funcpipe.client.control.commands import after_end, after_failure, commands, watch_command
from funcpipe.core import MB, Bill, Estimate, JobEstimate
from funcpipe.core.bill import earlier_text
from funcpipe.core.stores import DEFAULT
from funcpipe.core.texts import counted, number_text, shortened, usd_text
from funcpipe.show.terminal import Column, print_table

if TYPE_CHECKING:
    from funcpipe.analysis.compare import Report
    from funcpipe.api.evaluating import EvaluationResult
    from funcpipe.client.control.status import RunStatus, WorkerStatus
    from funcpipe.client.follow.results import RunResult
    from funcpipe.training.verify import Verification


def detached(run: str, storage: str | None, console: Console) -> None:
    """The commands that find a run again."""
    console.print(f"run {run} goes on without this command", soft_wrap=True)
    for command in (watch_command(run, storage), *commands(run, storage, watch="collect it")):
        console.print(command, soft_wrap=True)


def job_estimate(found: JobEstimate, max_usd: float | None, console: Console) -> None:
    """The estimate of a job: in one line, and item by item."""
    console.print(found.line(max_usd), soft_wrap=True)
    columns = (Column("item", text=True), Column("count"), Column("s"), Column("functions $"), Column("requests $"))
    rows = [
        (
            name.replace("_", "-"),
            str(item.count),
            number_text(item.seconds, 1) if item.seconds else "-",
            number_text(item.functions_usd, 6),
            number_text(item.requests_usd, 6),
        )
        for name, item in found.items.items()
        if item.count
    ]
    print_table(console, "", columns, rows)


def training_result(
    result: "RunResult",
    expected: Estimate | None,
    written: Mapping[str, str | None],
    kept_in: str | None,
    console: Console,
) -> None:
    """The cost of a run beside the items of stores that its plan expected of an iteration, and its results.

    The latter are the files that were `written`, and the storage in which the model is kept, if it is.
    """
    bill = result.bill
    console.print(
        f"{result.run}: loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f} in "
        f"{counted(len(result.losses), 'step')}; {_functions(bill)}, "
        f"{bill.requests_text}: "
        f"${usd_text(bill.cost_usd)} at the prices of {bill.platform}{earlier_text(bill)}"
    )
    if bill.prices_note:
        console.print(bill.prices_note, soft_wrap=True)
    stores_of_bill(bill, expected, len(result.losses), console)
    if result.skipped_steps:
        steps = ", ".join(str(step + 1) for step in result.skipped_steps)
        console.print(f"skipped, as their gradients were not finite: {len(result.skipped_steps)} steps: {steps}")
    for report in result.validations:
        best = " (best)" if report.step == result.best_step else ""
        console.print(f"after step {report.step}: {_values(report.values)}{best}")
    if result.validations and result.validations[-1].stop:
        console.print(f"ended early: {result.validations[-1].waited} validations were no better")
    for what, path in written.items():
        if path:
            console.print(f"{what}: {path}", soft_wrap=True)
    if kept_in is not None:
        console.print(f"the model is kept in {kept_in}", soft_wrap=True, markup=False)
        for command in after_end(result.run, kept_in):
            console.print(command, soft_wrap=True, markup=False)


def _functions(bill: Bill) -> str:
    return f"{counted(bill.functions, 'function')}, {number_text(bill.function_seconds, 1)} s"


def stores_of_bill(bill: Bill, expected: Estimate | None, steps: int, console: Console) -> None:
    """The cost of each kind of object in its store, beside that expected of `steps` iterations.

    Nothing where all is in the default store.
    """
    if all(item.store == DEFAULT for item in bill.stores):
        return
    items = {} if expected is None else {item.kind: steps * item.cost_usd for item in expected.stores}
    columns = (
        *(Column("kind", text=True), Column("store", text=True)),
        *(Column("puts", drop=2), Column("lists", drop=2), Column("gets", drop=2), Column("requests $", drop=3)),
        *(Column("MB sent", drop=1), Column("received", drop=1), Column("bytes $", drop=4), Column("hours $", drop=4)),
        *(Column("all $"), Column("expected $")),
    )
    rows = [
        (
            *("all else" if item.kind == DEFAULT else item.kind, item.store),
            *(str(item.requests.puts), str(item.requests.lists), str(item.requests.gets)),
            number_text(item.request_usd, 6),
            *(number_text(item.requests.sent_bytes / MB, 2), number_text(item.requests.received_bytes / MB, 2)),
            *(number_text(item.transfer_usd, 6), number_text(item.hours_usd, 6), number_text(item.cost_usd, 6)),
            number_text(items[item.kind], 6) if item.kind in items else "-",
        )
        for item in bill.stores
    ]
    print_table(console, "", columns, rows)


def evaluation(found: "EvaluationResult", console: Console) -> None:
    """The result of an evaluation, and its cost."""
    console.print(f"{found.run}: {found.samples} samples: {_values({'loss': found.loss, **found.metrics})}")
    bill = found.bill
    console.print(f"{_functions(bill)}: ${usd_text(bill.cost_usd)} at the prices of {bill.platform}")


def predictions(shapes: Mapping[str, list[int]], path: str, console: Console) -> None:
    """The outputs that were written to the file at `path`."""
    console.print(f"{path}: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}", soft_wrap=True)


def _values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())


def run_status(found: "RunStatus", storage: str, console: Console) -> None:
    """The status of a run in `storage`, and of each of its workers."""
    columns = (
        *(Column("worker", text=True), Column("attempt", drop=2), Column("step"), Column("saved", drop=4)),
        *(Column("peak MB", drop=3), Column("$"), Column("seen s ago", drop=1), Column("doing", text=True)),
    )
    rows = [
        (
            worker.worker,
            str(worker.attempt),
            str(worker.step),
            str(worker.saved_step),
            f"{worker.memory_bytes / MB:.0f} of {worker.memory_mb}",
            number_text(worker.spent_usd, 6),
            "-" if worker.heard_s is None else f"{worker.heard_s:.0f}",
            doing(worker),
        )
        for worker in found.workers
    ]
    title = f"{found.run}: step {found.step} of {found.steps}, {found.run_s:.0f} s, ${number_text(found.run_usd, 6)}"
    print_table(console, title, columns, rows)
    console.print(f"{found.verdict.value}: {found.explanation}", markup=False)
    if found.loss_over is not None:
        console.print(f"losses are means over {found.loss_over}", markup=False)
    if found.halt is not None:
        console.print(f"ends early: {shortened(found.halt, kept=ERROR_CHARACTERS)}", markup=False)
    for command in commands_after(found, storage):
        console.print(command, soft_wrap=True, markup=False)


def commands_after(found: "RunStatus", storage: str) -> tuple[str, ...]:
    """The next commands for a run that has ended or is dead; none for one that goes on."""
    if found.verdict.value not in ("dead", "failed", "stopped", "finished"):
        return ()
    if found.kept:
        return after_end(found.run, storage)
    watch = "collect it" if found.verdict.value == "finished" else "resume it"
    return after_failure(found.run, storage, watch=watch)


ERROR_CHARACTERS = 200
"""A table shows so many characters of the beginning of an error, and as many of its end; the run's logs have more."""


def doing(worker: "WorkerStatus") -> str:
    """The tasks of a worker, a line for each of its lanes, or its end."""
    if worker.outcome is not None or worker.state.value not in ("working", "starting"):
        state = worker.state.value if worker.outcome is None else worker.outcome.value
        return state + (f": {shortened(worker.error, kept=ERROR_CHARACTERS)}" if worker.error else "")
    lines = [
        f"{busy.lane}: {busy.task}"
        + (f" waiting for {busy.awaits}," if busy.awaits else ",")
        + f" {busy.since_s:.1f} s"
        for busy in worker.busy
    ]
    return "\n".join(lines) or ("starting" if worker.state.value == "starting" else "between two steps")


def verification(found: "Verification", console: Console) -> None:
    """Every tensor of the model, and whether it agrees."""
    columns = (
        *(Column("layer", text=True), Column("tensor", text=True)),
        *(Column("difference"), Column("allowed", drop=2), Column("judged by", text=True, drop=1)),
        Column("verdict", text=True),
    )
    rows = [
        (
            tensor.layer,
            tensor.name,
            f"{tensor.difference:.2e}",
            f"{found.allowed(tensor):.2e}",
            tensor.yardstick.value,
            "equal" if found.accepts(tensor) else "DIFFERS",
        )
        for tensor in found.tensors
    ]
    title = f"{found.steps} steps on functions, compared with one process on {found.reference.value}"
    print_table(console, title, columns, rows)
    if found.agrees and found.off_whole is not None:
        console.print(
            f"equal to accumulated micro-batches, not to whole batches ({found.off_whole.name} differs by "
            f"{found.off_whole.difference:.1e}): BatchNorm, the loss or something else couples the samples of a batch"
        )
    if found.agrees:
        explained = sum(tensor.yardstick.value == "rounding" for tensor in found.tensors)
        console.print(
            f"all {len(found.tensors)} tensors agree to {found.tolerance:g} of what training changed in them"
            + (f", {explained} of them to what rounding does to plain training" if explained else "")
        )


def comparison(found: "Report", path: str, console: Console) -> None:
    """Predicted and observed times, lane by lane."""
    columns = (
        *(Column("stage"), Column("lane", text=True)),
        *(Column("predicted s"), Column("observed s"), Column("ratio")),
        *(Column("wait s", drop=4), Column("idle s", drop=3), Column("predicted idle s", drop=1)),
        *(Column("$", drop=5), Column("idle $", drop=2)),
    )
    rows = [
        (
            str(lane.stage),
            lane.lane.value,
            number_text(lane.predicted.busy_s, 4),
            number_text(lane.observed.busy_s, 4),
            "-" if lane.ratio is None else f"{lane.ratio:.2f}",
            number_text(lane.observed.wait_s, 4),
            number_text(lane.observed.idle_s, 4),
            number_text(lane.predicted.idle_s, 4),
            "-" if lane.observed.usd is None else number_text(lane.observed.usd, 7),
            "-" if not lane.observed.idle_usd else number_text(lane.observed.idle_usd, 7),
        )
        for lane in found.lanes
    ]
    print_table(console, f"{found.run}: one iteration, median of {found.steps} steps", columns, rows)
    ratio = "" if found.ratio is None else f", ratio {found.ratio:.2f}"
    console.print(
        f"iteration: predicted {number_text(found.predicted_iteration_s, 4)} s, "
        f"observed {number_text(found.observed_iteration_s, 4)} s{ratio}"
    )
    console.print(f"trace: {path} (open it at https://ui.perfetto.dev)", soft_wrap=True)
