"""Descriptions of runs: their estimates, status, results and bills, and how those compare."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from funcpipe.client.control.commands import after_end, after_failure, commands, watch_command
from funcpipe.core import MB, Bill, Estimate, JobEstimate
from funcpipe.core.bill import earlier_text
from funcpipe.core.stores import DEFAULT
from funcpipe.core.texts import counted, number_text, shortened, usd_text
from funcpipe.show.describe import Column, Description, Table, seconds, usd
from funcpipe.show.starts import parts_text, start_text

if TYPE_CHECKING:
    from funcpipe.analysis.compare import Report
    from funcpipe.api.evaluating import EvaluationResult
    from funcpipe.client.control.status import RunStatus, WorkerStatus
    from funcpipe.client.follow.results import RunResult
    from funcpipe.training.verify import Verification

ERROR_CHARACTERS = 200
"""A table has so many characters of the beginning of an error, and as many of its end; the run's logs have more."""


def detached(run: str, storage: str | None) -> Description:
    """Return the commands that find a run again."""
    found = (watch_command(run, storage), *commands(run, storage, watch="collect it"))
    return Description(title=f"run {run} goes on without this command", commands=found)


def job_estimate(found: JobEstimate, max_usd: float | None = None) -> Description:
    """Return the estimate of a job: in one line, and item by item."""
    columns = (Column("item", text=True), Column("count"), Column("s"), Column("functions $"), Column("requests $"))
    rows = tuple(
        (
            *(name.replace("_", "-"), str(item.count), number_text(item.seconds, 1) if item.seconds else "-"),
            *(number_text(item.functions_usd, 6), number_text(item.requests_usd, 6)),
        )
        for name, item in found.items.items()
        if item.count
    )
    parts = parts_text(found.start_parts)
    facts = (("a start", parts),) if parts else ()
    return Description(title=found.line(max_usd), facts=facts, tables=(Table(columns=columns, rows=rows),))


def training_result(
    result: "RunResult",
    expected: Estimate | None = None,
    written: Mapping[str, str | None] | None = None,
    kept_in: str | None = None,
) -> Description:
    """Return the losses of a run, and its cost beside the items of stores that its plan `expected` of an iteration.

    On the command line, `written` are the files with its results, and the model is kept in the storage `kept_in`.
    """
    bill, losses = result.bill, result.losses
    fell = f", loss {losses[0]:.4f} -> {losses[-1]:.4f}" if losses else ""
    facts = [
        ("cost", f"${usd_text(bill.cost_usd)} at the prices of {bill.platform}{earlier_text(bill)}"),
        ("used", f"{_functions(bill)}, {bill.requests_text}"),
    ]
    if written is None:
        values = sum(tensor.numel() for tensor in result.tensors.values())
        facts.append(("model", f"{counted(len(result.tensors), 'tensor')} of {values:,} numbers: state_dict()"))
        if any(item.store != DEFAULT for item in bill.stores):
            items = [f"{item.kind} in {item.store} ${usd_text(item.cost_usd)}" for item in bill.stores]
            facts.append(("stores", ", ".join(items)))
    if bill.prices_note:
        facts.append(("prices", bill.prices_note))
    if result.skipped_steps:
        steps = ", ".join(str(step + 1) for step in result.skipped_steps)
        skipped = f"{counted(len(result.skipped_steps), 'step')} whose gradients were not finite: {steps}"
        facts.append(("skipped", skipped))
    if result.validations:
        last = result.validations[-1]
        best = f"; the best was after step {result.best_step}" if result.best_step is not None else ""
        facts.append(("validated", f"after step {last.step}: {_values(last.values)}{best}"))
        if last.stop:
            facts.append(("ended early", f"{last.waited} validations were no better"))
    if result.callback_errors:
        facts.append(("callbacks", f"{counted(len(result.callback_errors), 'callback')} failed: callback_errors"))
    facts += [(what, path) for what, path in (written or {}).items() if path]
    facts += [] if kept_in is None else [("", f"the model is kept in {kept_in}")]
    return Description(
        title=f"Result of run {result.run}: {counted(len(losses), 'step')}{fell}",
        facts=tuple(facts),
        tables=(*stores_of_bill(bill, expected, len(losses)), *_validations(result)),
        figure=losses,
        commands=() if kept_in is None else after_end(result.run, kept_in),
    )


def _functions(bill: Bill) -> str:
    return f"{counted(bill.functions, 'function')} for {number_text(bill.function_seconds, 1)} s"


def _values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())


def _validations(result: "RunResult") -> Iterator[Table]:
    names = dict.fromkeys(name for report in result.validations for name in report.values)
    if len(result.validations) < 2:
        return
    rows = tuple(
        (
            f"{report.step}{' (best)' if report.step == result.best_step else ''}",
            *(f"{report.values[name]:.4f}" if name in report.values else "-" for name in names),
        )
        for report in result.validations
    )
    yield Table(columns=(Column("validated after step", text=True), *map(Column, names)), rows=rows)


def stores_of_bill(bill: Bill, expected: Estimate | None, steps: int) -> Iterator[Table]:
    """Return the cost of each kind of object in its store, beside that expected of `steps` iterations.

    Nothing where all is in the default store.
    """
    if all(item.store == DEFAULT for item in bill.stores):
        return
    items = {} if expected is None else {item.kind: steps * item.cost_usd for item in expected.stores}
    columns = (
        *(Column("kind", text=True), Column("store", text=True)),
        *(Column("puts", drop=2), Column("lists", drop=2), Column("gets", drop=2), Column("requests $", drop=3)),
        *(Column("MB sent", drop=1), Column("received", drop=1), Column("bytes $", drop=4), Column("hours $", drop=4)),
        *(Column("all $"), Column("expected $"), Column("all / expected", drop=2)),
    )
    rows = tuple(
        (
            *("all else" if item.kind == DEFAULT else item.kind, item.store),
            *(str(item.requests.puts), str(item.requests.lists), str(item.requests.gets)),
            number_text(item.request_usd, 6),
            *(number_text(item.requests.sent_bytes / MB, 2), number_text(item.requests.received_bytes / MB, 2)),
            *(number_text(item.transfer_usd, 6), number_text(item.hours_usd, 6), number_text(item.cost_usd, 6)),
            number_text(items[item.kind], 6) if item.kind in items else "-",
            f"{item.cost_usd / items[item.kind]:.2f}" if items.get(item.kind) else "-",
        )
        for item in bill.stores
    )
    yield Table(columns=columns, rows=rows, title="What each kind of object took of its store")


def bill(found: Bill, expected: Estimate | None = None, steps: int = 0, *, earlier_steps: int = 0) -> Description:
    """Return the items of a bill, of `steps` steps since it was resumed, beside what was `expected` of as many."""
    facts = []
    if found.prices_note:
        facts.append(("prices", found.prices_note))
    if found.earlier_usd:
        note = f"Before it was resumed, the run had cost {usd(found.earlier_usd)}"
        facts.append(("", f"{note} for {counted(earlier_steps, 'step')}." if earlier_steps else f"{note}."))
    if expected is not None:
        unlike = "; what the client downloads is not" if found.traffic_usd else ""
        note = f"The estimate is that of an iteration, times the steps; start-up is in it as overhead{unlike}."
        facts.append(("", note))
    columns = (Column("item", text=True), Column("estimate"), Column("bill"), Column("bill / estimate"))
    title = f"{counted(steps, 'step')} on {found.platform}" if steps else f"Bill at the prices of {found.platform}"
    items = Table(columns=columns, rows=tuple(_items(found, expected, steps)), title=title)
    return Description(title="Bill", facts=tuple(facts), tables=(items, *stores_of_bill(found, expected, steps)))


def _items(found: Bill, expected: Estimate | None, steps: int) -> Iterator[tuple[str, ...]]:
    def item(name: str, spent: float, of: Callable[[Estimate], float] | None) -> tuple[str, ...]:
        estimated = None if expected is None or of is None else steps * of(expected)
        text = "{:,}".format if isinstance(spent, int) else usd
        ratio = f"{spent / estimated:.2f}" if estimated else ""
        return name, "" if estimated is None else text(estimated), text(spent), ratio

    yield item("functions", found.compute_usd, lambda each: each.compute_usd)
    yield item("requests", found.request_usd, lambda each: each.request_usd)
    if found.hours_usd or (expected is not None and expected.hours_usd):
        yield item("hours of stores", found.hours_usd, lambda each: each.hours_usd)
    if found.traffic_usd:
        yield item("downloads by the client", found.traffic_usd, None)
    overhead = "" if expected is None else usd(steps * expected.overhead_usd)
    yield "starts and hand-overs", overhead, "in the items above", ""
    yield item("all", found.cost_usd - found.earlier_usd, lambda each: each.cost_usd + each.overhead_usd)
    yield item("puts", found.puts, lambda each: each.puts)
    yield item("gets", found.gets, lambda each: each.gets)
    yield item("lists", found.lists, None)
    yield item("functions started", found.functions, None)
    yield "function time", "", seconds(found.function_seconds), ""


def estimate(found: Estimate) -> Description:
    """Return the items of the estimate of an iteration."""
    hours = [("hours of stores", usd(found.hours_usd))] if found.hours_usd else []
    rows = (
        *(("functions", usd(found.compute_usd)), ("requests", usd(found.request_usd)), *hours),
        ("starts and hand-overs", usd(found.overhead_usd)),
        ("all", usd(found.cost_usd + found.overhead_usd)),
        *(("puts", f"{found.puts:,}"), ("gets", f"{found.gets:,}")),
    )
    columns = (Column("item", text=True), Column("estimate"))
    items = Table(columns=columns, rows=rows, title="Estimate for one iteration")
    met = "" if found.meeting_s is None else f" in the mean, {seconds(found.meeting_s)} with a meeting"
    facts = (("iteration", seconds(found.iteration_s) + met), ("bottleneck", found.bottleneck))
    return Description(title="Bill", facts=facts, tables=(items,))


def evaluation(found: "EvaluationResult") -> Description:
    """Return the result of an evaluation, and its cost."""
    measured = _values({"loss": found.loss, **found.metrics})
    cost = f"${usd_text(found.bill.cost_usd)} at the prices of {found.bill.platform}"
    title = f"{found.run}: {counted(found.samples, 'sample')}: {measured}"
    return Description(title=title, facts=(("cost", f"{cost}, {_functions(found.bill)}"),))


def predictions(shapes: Mapping[str, list[int]], path: str) -> str:
    """Return the shapes of the outputs that were written to the file at `path`."""
    return f"{path}: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}"


def _device_text(worker: "WorkerStatus") -> str:
    """Return the peak of a worker on its accelerator, and what the plan expected."""
    planned = f", planned {worker.planned_device_bytes / MB:.0f}" if worker.planned_device_bytes else ""
    return f"{worker.device_bytes / MB:.0f}{planned}"


def run_status(found: "RunStatus", storage: str | None = None) -> Description:
    """Return the status of a run, and of each of its workers; with its `storage`, the commands that may come next."""
    has_gpus = any(worker.device_bytes or worker.planned_device_bytes for worker in found.workers)
    columns = (
        *(Column("worker", text=True), Column("attempt", drop=2), Column("step"), Column("saved", drop=4)),
        *((Column("peak MB", drop=3), Column("GPU MB", drop=3)) if has_gpus else (Column("peak MB", drop=3),)),
        *(Column("$"), Column("seen s ago", drop=1), Column("doing", text=True)),
    )
    rows = tuple(
        (
            *(worker.worker, str(worker.attempt), str(worker.step), str(worker.saved_step)),
            f"{worker.memory_bytes / MB:.0f} of {worker.memory_mb}",
            *((_device_text(worker),) if has_gpus else ()),
            number_text(worker.spent_usd, 6),
            "-" if worker.heard_s is None else f"{worker.heard_s:.0f}",
            doing(worker),
        )
        for worker in found.workers
    )
    facts = [(found.verdict.value, found.explanation)]
    facts += [] if found.loss_over is None else [("losses are means over", found.loss_over)]
    facts += [] if found.halt is None else [("ends early", shortened(found.halt, kept=ERROR_CHARACTERS))]
    begun = [
        (worker.start.seconds, worker.worker, worker.start) for worker in found.workers if worker.start is not None
    ]
    if begun:
        _, slowest, start = max(begun, key=lambda one: one[0])
        facts.append(("slowest start", f"{slowest}, {start_text(start)}"))
    progress = f"step {found.step} of {found.steps}, {found.run_s:.0f} s, ${number_text(found.run_usd, 6)}"
    return Description(
        title=f"{found.run}: {progress}",
        facts=tuple(facts),
        tables=(Table(columns=columns, rows=rows),),
        commands=() if storage is None else commands_after(found, storage),
    )


def commands_after(found: "RunStatus", storage: str) -> tuple[str, ...]:
    """Return the next commands for a run that has ended or is dead; none for one that goes on."""
    if found.verdict.value not in ("dead", "failed", "stopped", "finished"):
        return ()
    if found.kept:
        return after_end(found.run, storage)
    watch = "collect it" if found.verdict.value == "finished" else "resume it"
    return after_failure(found.run, storage, watch=watch)


def doing(worker: "WorkerStatus") -> str:
    """Return the tasks of a worker, a line for each of its lanes, or its end."""
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


def verification(found: "Verification") -> Description:
    """Return every tensor of the model, and whether it agrees."""
    columns = (
        *(Column("layer", text=True), Column("tensor", text=True)),
        *(Column("difference"), Column("allowed", drop=2), Column("judged by", text=True, drop=1)),
        Column("verdict", text=True),
    )
    rows = tuple(
        (
            *(tensor.layer, tensor.name, f"{tensor.difference:.2e}", f"{found.allowed(tensor):.2e}"),
            *(tensor.yardstick.value, "equal" if found.accepts(tensor) else "DIFFERS"),
        )
        for tensor in found.tensors
    )
    facts = []
    if found.agrees and (off := found.off_whole) is not None:
        differs = f"({off.name} differs by {off.difference:.1e}): BatchNorm, the loss or something else"
        text = f"equal to accumulated micro-batches, not to whole batches {differs} couples the samples of a batch"
        facts.append(("", text))
    if found.agrees and found.reference.value.startswith("local steps"):
        facts.append(("", "equal to the same algorithm in one process"))
    if found.agrees:
        explained = sum(tensor.yardstick.value == "rounding" for tensor in found.tensors)
        rounded = f", {explained} of them to what rounding does to plain training" if explained else ""
        agree = f"all {len(found.tensors)} tensors agree to {found.tolerance:g} of what training changed in them"
        facts.append(("", agree + rounded))
    return Description(
        title=f"{found.steps} steps on functions, compared with one process on {found.reference.value}",
        facts=tuple(facts),
        tables=(Table(columns=columns, rows=rows),),
    )


def comparison(found: "Report", path: str | None = None) -> Description:
    """Return predicted and observed times, lane by lane; the observed trace is at `path`."""
    columns = (
        *(Column("stage"), Column("lane", text=True)),
        *(Column("predicted s"), Column("observed s"), Column("ratio")),
        *(Column("wait s", drop=4), Column("idle s", drop=3), Column("predicted idle s", drop=1)),
        *(Column("$", drop=5), Column("idle $", drop=2)),
    )
    rows = tuple(
        (
            *(str(lane.stage), lane.lane.value),
            *(number_text(lane.predicted.busy_s, 4), number_text(lane.observed.busy_s, 4)),
            "-" if lane.ratio is None else f"{lane.ratio:.2f}",
            *(number_text(lane.observed.wait_s, 4), number_text(lane.observed.idle_s, 4)),
            number_text(lane.predicted.idle_s, 4),
            "-" if lane.observed.usd is None else number_text(lane.observed.usd, 7),
            "-" if not lane.observed.idle_usd else number_text(lane.observed.idle_usd, 7),
        )
        for lane in found.lanes
    )
    ratio = "" if found.ratio is None else f", ratio {found.ratio:.2f}"
    times = [number_text(found.predicted_iteration_s, 4), number_text(found.observed_iteration_s, 4)]
    facts = [("iteration", f"predicted {times[0]} s, observed {times[1]} s{ratio}")]
    facts += [] if path is None else [("trace", f"{path} (open it at https://ui.perfetto.dev)")]
    return Description(
        title=f"{found.run}: one iteration, median of {found.steps} steps",
        facts=tuple(facts),
        tables=(Table(columns=columns, rows=rows),),
    )
