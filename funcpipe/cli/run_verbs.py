"""The verbs for runs that are under way or were left: status, stop, clean."""

import argparse
from functools import partial

from rich.console import Console
from rich.table import Table

from funcpipe.cli import render
from funcpipe.client.control import RunStatus, WorkerStatus
from funcpipe.client.control import clean as clean_run
from funcpipe.client.control import status as status_of
from funcpipe.client.control import stop as stop_run
from funcpipe.core import MB, to_text
from funcpipe.platforms.catalog import open_platform, open_storage


def status(options: argparse.Namespace) -> None:
    """Say how a run fares."""
    found = status_of(open_storage(options.storage), options.name)
    render.show(options.json, to_text(found), partial(_draw, found))


def stop(options: argparse.Namespace) -> None:
    """End a run so that it can be resumed."""
    found = stop_run(open_storage(options.storage), options.name, open_platform, wait_s=options.wait)
    render.show(options.json, to_text(found), partial(_draw, found))


def clean(options: argparse.Namespace) -> None:
    """End a run's functions and delete all its objects."""
    count = clean_run(open_storage(options.storage), options.name, open_platform)
    summary = {"run": options.name, "objects": count}
    render.show(
        options.json,
        render.as_json(summary),
        lambda console: console.print(f"run {options.name}: {count} objects deleted"),
    )


def _draw(found: RunStatus, console: Console) -> None:
    table = Table(title=f"{found.run}: step {found.step} of {found.steps}, {found.run_s:.0f} s, ${found.run_usd:.6f}")
    for name in ("worker", "attempt", "step", "saved", "does", "peak MB", "$", "heard of"):
        table.add_column(name, justify="left" if name in ("worker", "does") else "right")
    for worker in found.workers:
        table.add_row(
            worker.worker,
            str(worker.attempt),
            str(worker.step),
            str(worker.saved_step),
            _does(worker),
            f"{worker.memory_bytes / MB:.0f} of {worker.memory_mb}",
            f"{worker.spent_usd:.6f}",
            f"{worker.heard_s:.0f} s ago",
        )
    console.print(table)
    if found.halt is not None:
        console.print(f"it ends early: {found.halt}")


def _does(worker: WorkerStatus) -> str:
    if worker.outcome is not None:
        return worker.outcome.value + (f": {worker.error}" if worker.error else "")
    lines = [
        f"{busy.lane}: {busy.task}"
        + (f" waits for {busy.awaits}" if busy.awaits else "")
        + f" for {busy.since_s:.1f} s"
        for busy in worker.busy
    ]
    return "\n".join(lines) or "between two steps"
